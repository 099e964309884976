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
  // Lets the workers run on every processor that they could use at the first call, except that of this thread. Where
  // they could use no other, they keep it.
  void from_caller(std::vector<std::thread>& workers) {
#if defined(__linux__)
    const int taken = ::sched_getcpu();
    if (taken == forbidden_ || taken < 0 || workers.empty()) return;
    if (forbidden_ < 0 && ::pthread_getaffinity_np(workers[0].native_handle(), sizeof own_, &own_) != 0) return;
    forbidden_ = taken;
    cpu_set_t allowed = own_;
    CPU_CLR(taken, &allowed);
    if (CPU_COUNT(&allowed) == 0) allowed = own_;
    for (std::thread& worker : workers) ::pthread_setaffinity_np(worker.native_handle(), sizeof allowed, &allowed);
#else
    static_cast<void>(workers);
#endif
  }

#if defined(__linux__)
 private:
  int forbidden_ = -1;
  cpu_set_t own_;  // of each worker, since one thread made them all
#endif
};

}  // namespace lowbit
