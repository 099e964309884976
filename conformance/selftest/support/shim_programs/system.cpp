// Threads as operating-system threads, for ThreadSanitizer: small blocks, in a separate process.
//
// This file and the runtime are compiled without the sanitizer, and wait on atomics that it does not see: if it saw a
// lock, it would take everything that two threads do around a shuffle for ordered. Only the order that barriers create
// is reported to it.

#include <sched.h>
#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <thread>

#include "modes.h"

extern "C" {
void __tsan_acquire(void* address);
void __tsan_release(void* address);
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}

namespace lowbit_shim {

namespace {

constexpr unsigned MOST = 1024;  // threads of a block
constexpr int FAILED = 3;

// Hundreds of waiting threads must not keep a processor busy.
#if defined(__linux__)
void sleep_while(std::atomic<unsigned>& number, unsigned value) {
  syscall(SYS_futex, &number, FUTEX_WAIT_PRIVATE, value, nullptr, nullptr, 0);
}
void wake_up(std::atomic<unsigned>& number) { syscall(SYS_futex, &number, FUTEX_WAKE_PRIVATE, 1, nullptr, nullptr, 0); }
#else
void sleep_while(std::atomic<unsigned>&, unsigned) { sched_yield(); }
void wake_up(std::atomic<unsigned>&) {}
#endif

thread_local Thread* current_thread = nullptr;
std::atomic<bool> busy{false};
std::vector<std::atomic<unsigned>> released(MOST);  // how often each thread was released
std::vector<unsigned> waited(MOST);

}  // namespace

Thread* current() { return current_thread; }
bool own_stack(const Thread&, const char*) { return false; }
int stack_owner(const char*) { return -1; }

// The sanitizer sees calls of the standard library even from this file; between these calls it ignores them.
void lock() {
  while (busy.exchange(true, std::memory_order_acquire)) sched_yield();
  AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
  AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
}
void unlock() {
  AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
  AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  busy.store(false, std::memory_order_release);
}

void suspend(Thread& thread) {
  unlock();
  const unsigned number = thread.number;
  while (released[number].load(std::memory_order_acquire) == waited[number]) sleep_while(released[number], waited[number]);
  ++waited[number];
  lock();
}

void resume(Thread& thread) {
  released[thread.number].fetch_add(1, std::memory_order_release);
  wake_up(released[thread.number]);
}
void yield(Thread&) {}

// After a failure the process ends, because its other threads cannot be ended.
void abandon(const std::string& failure) {
  std::fprintf(stderr, "%s\n", failure.c_str());
  std::_Exit(FAILED);
}

void run_block() {
  std::vector<std::thread> running;
  for (Thread& thread : threads().threads) {
    waited[thread.number] = released[thread.number].load();
    running.emplace_back([&thread] {
      current_thread = &thread;
      call_kernel();
      lock();
      threads().leave(thread);
      unlock();
    });
  }
  for (std::thread& thread : running) thread.join();
}

// Consecutive meetings use different places, because some threads may not have left the previous one yet. (Where only
// some lanes of a warp meet, this orders more than the barrier does; the watch is exact here.)
char places[2][MOST / LANES + 1];
unsigned met[MOST][2];

char* place_of(const Thread& thread, bool all) {
  return &places[met[thread.number][all] % 2][all ? MOST / LANES : thread.warp()];
}

void before_meeting(const Thread& thread, bool all) { __tsan_release(place_of(thread, all)); }
void after_meeting(const Thread& thread, bool all) {
  __tsan_acquire(place_of(thread, all));
  ++met[thread.number][all];
}

}  // namespace lowbit_shim
