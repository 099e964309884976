// Keeps worker threads off the processor on which their caller runs. Does nothing outside Linux.
//
// A scheduler may wake a worker on the processor of its caller. The worker then waits there until the caller's slice of
// time is over, and the call takes as long as with one thread. A guest of KVM does so after a rest of a few milliseconds:
// the host has taken an idle processor away by then, and the guest does not count it as idle.
#pragma once

#include <thread>
#include <vector>

#if defined(__linux__)
#include <pthread.h>
#include <sched.h>
#endif

namespace lowbit {

class Separation {
 public:
  // Forbids all workers the processor of this thread, and allows the one that was forbidden before. A worker that may
  // use no other keeps it.
  void from_caller(std::vector<std::thread>& workers) {
#if defined(__linux__)
    const int taken = ::sched_getcpu();
    if (taken == forbidden_ || taken < 0) return;
    for (std::thread& worker : workers) {
      cpu_set_t allowed;
      if (::pthread_getaffinity_np(worker.native_handle(), sizeof allowed, &allowed) != 0) continue;
      if (forbidden_ >= 0) CPU_SET(forbidden_, &allowed);
      CPU_CLR(taken, &allowed);
      ::pthread_setaffinity_np(worker.native_handle(), sizeof allowed, &allowed);  // refused if it is empty
    }
    forbidden_ = taken;
#else
    static_cast<void>(workers);
#endif
  }

#if defined(__linux__)
 private:
  int forbidden_ = -1;
#endif
};

}  // namespace lowbit
