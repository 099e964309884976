// What a mode of running threads is: fibers.cpp, or system.cpp with threads of the system.
#pragma once

#include "threads.h"

namespace lowbit_shim {

Thread* current();  // the thread that is running; null outside of kernels
void run_block();   // every thread of `threads()`, until all have left or one has failed
[[noreturn]] void abandon(const std::string& failure);  // end the block, from within one of its threads
void yield(Thread& thread);   // let others run, perhaps


// Between these a thread is alone in what it does to `threads()`.
void lock();
void unlock();
// For the sanitizer of threads: what a barrier, of all or of a warp, puts in order.
void before_meeting(const Thread& thread, bool all);
void after_meeting(const Thread& thread, bool all);

bool own_stack(const Thread& thread, const char* address);
int stack_owner(const char* address);  // a thread's number, or -1

// What runtime.cpp brings to them.
Threads& threads();
void call_kernel();
std::size_t pick(std::size_t count);  // a number below `count`, from the seed

}  // namespace lowbit_shim
