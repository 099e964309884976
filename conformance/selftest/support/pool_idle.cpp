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

// The clock once its thread has run since `before` and then not for two milliseconds: on a busy machine a thread that was
// woken may wait for a processor.
static long long at_rest(clockid_t clock, long long before) {
  for (int still = 0; still < 2;) {
    const long long last = now(clock);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    still = last > before && now(clock) == last ? still + 1 : 0;
  }
  return now(clock);
}

struct Worker {
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<clockid_t> clock{0};
};

// The caller waits in its chunk for the worker to come once and leave its clock.
static void find_worker(const void* context, std::int64_t, std::int64_t) {
  auto& worker = *static_cast<Worker*>(const_cast<void*>(context));
  clockid_t clock = 0;
  if (std::this_thread::get_id() != worker.caller) pthread_getcpuclockid(pthread_self(), &clock);
  if (clock) worker.clock = clock;
  while (!worker.clock) std::this_thread::sleep_for(std::chrono::microseconds(50));
}

int main() {
  lowbit::Pool pool(2);
  Worker worker;
  pool.run(2, 1, true, find_worker, &worker);
  std::vector<long long> spent;
  for (int call = 0; call < 101; ++call) {
    const long long before = now(worker.clock);
    pool.run(2, 1, true, [](const void*, std::int64_t, std::int64_t) {}, nullptr);
    spent.push_back(at_rest(worker.clock, before) - before);
  }
  std::sort(spent.begin(), spent.end());
  std::printf("%lld\n", spent[spent.size() / 2]);
}
