// Waiting of threads: they spin on a number for a moment, then sleep until another thread reports that it changed.
//
// On Linux sleeping is one system call on the number itself, and waking is another, made only if a thread sleeps.
// Elsewhere a condition variable does the same; LOWBIT_NO_FUTEX selects it on Linux too, for tests.
#pragma once

#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>

#if defined(__linux__) && !defined(LOWBIT_NO_FUTEX)
#define LOWBIT_FUTEX 1
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#define LOWBIT_FUTEX 0
#include <condition_variable>
#include <mutex>
#endif

namespace lowbit {

// Tells the processor that this thread spins: that saves power and leaves the core to its sibling thread.
inline void relax() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

// Spins until the condition holds, for at most this time; returns whether it holds. Makes no system call.
template <class Condition>
bool watch(std::chrono::nanoseconds patience, Condition condition) {
  if (condition()) return true;
  const auto deadline = std::chrono::steady_clock::now() + patience;
  do {
    for (int n = 0; n < 8; ++n) {
      relax();
      if (condition()) return true;
    }
  } while (std::chrono::steady_clock::now() < deadline);
  return false;
}

// A number that threads can wait on.
class Word {
 public:
  std::atomic<std::uint32_t> value{0};

  // Sleeps while the number is `old`. It may return early, so the caller checks again.
  void sleep_while(std::uint32_t old) {
#if LOWBIT_FUTEX
    ::syscall(SYS_futex, &value, FUTEX_WAIT_PRIVATE, old, nullptr, nullptr, 0);
#else
    std::unique_lock<std::mutex> guard(mutex_);
    changed_.wait(guard, [&] { return value.load() != old; });
#endif
  }

  // Wakes up to this many sleeping threads, after the number was changed.
  void wake(int most) {
#if LOWBIT_FUTEX
    ::syscall(SYS_futex, &value, FUTEX_WAKE_PRIVATE, most, nullptr, nullptr, 0);
#else
    { std::lock_guard<std::mutex> guard(mutex_); }  // from here no thread is between its check and its sleep
    static_cast<void>(most);
    changed_.notify_all();
#endif
  }

  void wake_all() { wake(INT_MAX); }

 private:
#if LOWBIT_FUTEX
  static_assert(sizeof(std::atomic<std::uint32_t>) == 4, "the kernel looks at four bytes");
#else
  std::mutex mutex_;
  std::condition_variable changed_;
#endif
};

}  // namespace lowbit
