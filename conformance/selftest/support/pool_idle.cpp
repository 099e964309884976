// Prints what a worker's processor time is, in nanoseconds, for a call that has next to nothing to do and is followed
// by none until the worker sleeps: the median of many. It is what waking up, watching for work and falling asleep cost.
#include <cstdio>
#include <ctime>

#include "pool.h"

static long long now(clockid_t clock) {
  timespec time;
  clock_gettime(clock, &time);
  return time.tv_sec * 1000000000ll + time.tv_nsec;
}

// The clock once its thread has not run for two milliseconds: on a busy machine a thread may wait for a processor.
static long long at_rest(clockid_t clock) {
  for (int still = 0; still < 2;) {
    const long long last = now(clock);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    still = now(clock) == last ? still + 1 : 0;
  }
  return now(clock);
}

struct Worker {
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<clockid_t> clock{0};
  std::atomic<bool> came{false};
};

// The worker leaves its clock, and the caller waits in its chunk for it to come: by the clock alone it cannot be told
// whether the worker ran, since a virtual machine may count a short run as the host's time.
static void visit(const void* context, std::int64_t, std::int64_t) {
  auto& worker = *static_cast<Worker*>(const_cast<void*>(context));
  if (std::this_thread::get_id() != worker.caller) {
    clockid_t clock = 0;
    pthread_getcpuclockid(pthread_self(), &clock);
    worker.clock = clock, worker.came = true;
  }
  while (!worker.came) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

int main() {
  lowbit::Pool pool(2);
  Worker worker;
  pool.run(2, 1, true, visit, &worker);
  std::vector<long long> spent;
  for (int call = 0; call < 101; ++call) {
    const long long before = at_rest(worker.clock);
    worker.came = false;
    pool.run(2, 1, true, visit, &worker);
    spent.push_back(at_rest(worker.clock) - before);
  }
  std::sort(spent.begin(), spent.end());
  std::printf("%lld\n", spent[spent.size() / 2]);
}
