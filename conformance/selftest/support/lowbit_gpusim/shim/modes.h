// The interface of a mode of running threads: fibers.cpp, or system.cpp with operating-system threads.
#pragma once

#include "threads.h"

namespace lowbit_shim {

Thread* current();  // the running thread; null outside kernels
void run_block();   // run every thread of `threads()` until all have returned or one has failed
[[noreturn]] void abandon(const std::string& failure);  // end the block, from within one of its threads
void yield(Thread& thread);   // may switch to another thread


// Between these calls, a thread has exclusive access to `threads()`.
void lock();
void unlock();
// These tell ThreadSanitizer what a barrier, of the block or of a warp, orders.
void before_meeting(const Thread& thread, bool all);
void after_meeting(const Thread& thread, bool all);

bool own_stack(const Thread& thread, const char* address);
int stack_owner(const char* address);  // a thread's number, or -1

// What runtime.cpp provides to the modes.
Threads& threads();
void call_kernel();
std::size_t pick(std::size_t count);  // a number below `count`, from the seed

}  // namespace lowbit_shim
