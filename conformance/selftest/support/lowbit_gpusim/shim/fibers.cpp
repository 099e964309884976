// Threads as fibers: one runs until it must wait; the seed decides which one runs next.

#include <sys/mman.h>

#include <cstdlib>

#include "modes.h"

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__x86_64__) && !defined(LOWBIT_SHIM_UCONTEXT)

// Push the registers that a call must preserve, then switch to the other stack.
extern "C" void lowbit_shim_switch(void** from, void* to);
asm(R"(
.text
.hidden lowbit_shim_switch
.globl lowbit_shim_switch
.type lowbit_shim_switch, @function
lowbit_shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size lowbit_shim_switch, . - lowbit_shim_switch
)");

namespace lowbit_shim {
namespace {

using Context = void*;

void begin_context(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  void** top = reinterpret_cast<void**>(stack + bytes) - 2;
  top[0] = reinterpret_cast<void*>(entry);
  top[1] = nullptr;
  for (int saved = 1; saved <= 6; ++saved) top[-saved] = nullptr;
  context = top - 6;
}

void change_context(Context& from, Context& to) { lowbit_shim_switch(&from, to); }

}  // namespace
}  // namespace lowbit_shim

#else

#include <ucontext.h>

namespace lowbit_shim {
namespace {

using Context = ucontext_t;

void begin_context(Context& context, char* stack, std::size_t bytes, void (*entry)()) {
  getcontext(&context);
  context.uc_stack.ss_sp = stack;
  context.uc_stack.ss_size = bytes;
  context.uc_link = nullptr;
  makecontext(&context, entry, 0);
}

void change_context(Context& from, Context& to) { swapcontext(&from, &to); }

}  // namespace
}  // namespace lowbit_shim

#endif

namespace lowbit_shim {

namespace {

#if defined(__SANITIZE_ADDRESS__)
constexpr std::size_t STACK = 512 << 10;  // includes the sanitizer's space around each variable
#else
constexpr std::size_t STACK = 64 << 10;
#endif
constexpr std::size_t GUARD = 4096;  // an inaccessible area below each stack

struct Fiber {
  Context context{};
  char* stack = nullptr;
};

std::vector<Fiber> fibers;      // reused by later launches
std::vector<unsigned> ready;    // threads that may run
Context launcher;               // the context that requested the launch
Thread* current_thread = nullptr;

#if defined(__SANITIZE_ADDRESS__)
const void* launcher_stack;
std::size_t launcher_bytes;
void* left;  // the sanitizer's state of the fiber that was left; a fiber has no fake stack
void before_change(const void* stack, std::size_t bytes) { __sanitizer_start_switch_fiber(&left, stack, bytes); }
void after_change(bool learn) {
  const void* stack;
  std::size_t bytes;
  __sanitizer_finish_switch_fiber(nullptr, &stack, &bytes);
  if (learn) launcher_stack = stack, launcher_bytes = bytes;
}
#else
void before_change(const void*, std::size_t) {}
void after_change(bool) {}
#endif

bool from_launcher = false;

Thread& next_thread() {
  const std::size_t chosen = pick(ready.size());
  Thread& next = threads().threads[ready[chosen]];
  ready[chosen] = ready.back();
  ready.pop_back();
  return next;
}

void run(Context& from, Thread& next) {
  Fiber& fiber = fibers[next.number];
  current_thread = &next;
  before_change(fiber.stack, STACK);
  change_context(from, fiber.context);
}

[[noreturn]] void back_to_launcher(Context& from) {
#if defined(__SANITIZE_ADDRESS__)
  before_change(launcher_stack, launcher_bytes);
#endif
  current_thread = nullptr;
  change_context(from, launcher);
  __builtin_unreachable();
}

void fiber_main() {
  after_change(from_launcher);
  from_launcher = false;
  Thread& self = *current_thread;
  call_kernel();
  threads().leave(self);
  Context& mine = fibers[self.number].context;
  if (ready.empty()) back_to_launcher(mine);
  run(mine, next_thread());
  __builtin_unreachable();
}

char* new_stack() {
  void* room = mmap(nullptr, STACK + GUARD, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (room == MAP_FAILED || mprotect(room, GUARD, PROT_NONE) != 0) std::abort();
  return static_cast<char*>(room) + GUARD;
}

}  // namespace

Thread* current() { return current_thread; }

bool own_stack(const Thread& thread, const char* address) {
  const char* stack = fibers[thread.number].stack;
  return address >= stack && address < stack + STACK;
}

int stack_owner(const char* address) {
  for (std::size_t number = 0; number < fibers.size(); ++number)
    if (address >= fibers[number].stack && address < fibers[number].stack + STACK) return static_cast<int>(number);
  return -1;
}

void suspend(Thread& thread) {
  Thread& next = next_thread();
  if (&next == &thread) return;
  run(fibers[thread.number].context, next);
  after_change(false);
}

void resume(Thread& thread) { ready.push_back(thread.number); }

void yield(Thread& thread) {
  resume(thread);
  suspend(thread);
}

void run_block() {
  const unsigned count = static_cast<unsigned>(threads().threads.size());
  ready.clear();
  while (fibers.size() < count) {
    fibers.emplace_back();
    fibers.back().stack = new_stack();
  }
  for (unsigned number = 0; number < count; ++number) {
#if defined(__SANITIZE_ADDRESS__)
    __asan_unpoison_memory_region(fibers[number].stack, STACK);
#endif
    begin_context(fibers[number].context, fibers[number].stack, STACK, fiber_main);
    ready.push_back(number);
  }
  from_launcher = true;
  run(launcher, next_thread());
  after_change(false);
}

void lock() {}
void unlock() {}
void before_meeting(const Thread&, bool) {}
void after_meeting(const Thread&, bool) {}

void abandon(const std::string&) { back_to_launcher(fibers[current_thread->number].context); }

}  // namespace lowbit_shim
