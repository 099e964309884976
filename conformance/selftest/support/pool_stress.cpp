// The pool of threads by itself: what it promises, and as much of everything at once as a sanitizer can watch.
// Each check says what it proves and ends the program where it does not hold; one that hangs is ended by its caller.
#include <cstdio>
#include <cstdlib>
#include <initializer_list>

#include "pool.h"

using lowbit::Pool;
using lowbit::Status;

static void check(bool holds, const char* what) {
  if (holds) return;
  std::fprintf(stderr, "not so: %s\n", what);
  std::exit(1);
}

static void pass_by(int microseconds) { std::this_thread::sleep_for(std::chrono::microseconds(microseconds)); }

// A range in which every index is counted, by plain additions, so that two threads at one index are a data race.
struct Range {
  std::vector<int> times;
  explicit Range(std::int64_t count) : times(count) {}
  static void body(const void* context, std::int64_t first, std::int64_t last) {
    check(first < last || last == 0, "no chunk is empty but that of an empty range");
    for (std::int64_t i = first; i < last; ++i) ++static_cast<Range*>(const_cast<void*>(context))->times[i];
  }
  bool covered_once() const {
    return std::all_of(times.begin(), times.end(), [](int n) { return n == 1; });
  }
};

static bool covers(Pool& pool, std::int64_t count, std::int64_t grain, bool wake) {
  Range range(count);
  return pool.run(count, grain, wake, Range::body, &range) == lowbit::OK && range.covered_once();
}

// Every index exactly once: fewer indices than threads, grains that do not divide, one chunk, many.
static void every_index_once() {
  for (int threads : {1, 2, 3, 6}) {
    Pool pool(threads);
    check(pool.threads() == threads, "a pool has the threads asked for");
    for (std::int64_t count : {0, 1, 2, 3, 5, 7, 64, 1000, 4097})
      for (std::int64_t grain : {1, 2, 5, 64, 5000})
        for (bool wake : {false, true}) check(covers(pool, count, grain, wake), "every index exactly once");
    check(covers(pool, 100000, 1, true), "every index exactly once, of more than 16 bits tell");
  }
}

// Chunks are counted in 32 bits: where there would be more of them, they are larger.
static void very_many_indices() {
  for (std::int64_t count : {std::int64_t{1} << 32, (std::int64_t{1} << 40) + 1, INT64_MAX}) {
    const std::int64_t grain = Pool::grain_for(count, 1);
    check((count - 1) / grain + 1 < (std::int64_t{1} << 32), "chunks are few enough to be counted");
  }
  check(Pool::grain_for(1000, 7) == 7 && Pool::grain_for(1000, 0) == 1, "otherwise they are as the caller says");
}

// The threads of a call meet in their first chunks; each of them has begun at a share of its own.
struct Meeting {
  int threads;
  std::mutex mutex;
  std::vector<std::int64_t> begun;
  static void body(const void* context, std::int64_t first, std::int64_t) {
    auto& self = *static_cast<Meeting*>(const_cast<void*>(context));
    static thread_local int met;  // the size of the last meeting that this thread was in
    if (met == self.threads) return;
    met = self.threads;
    std::unique_lock<std::mutex> guard(self.mutex);
    self.begun.push_back(first);
    while (static_cast<int>(self.begun.size()) < self.threads) {
      guard.unlock();
      pass_by(50);
      guard.lock();
    }
  }
};

static void shares() {
  for (int threads : {2, 3, 4}) {
    Pool pool(threads);
    Meeting meeting{threads, {}, {}};
    pool.run(120, 1, true, Meeting::body, &meeting);
    std::sort(meeting.begun.begin(), meeting.begun.end());
    for (int n = 0; n < threads; ++n) check(meeting.begun[n] == 120 / threads * n, "shares are equal and in order");
  }
}

// Whoever has the first index waits in it until all others are done, so the other thread takes over its share.
struct Stuck {
  std::atomic<int> done{0};
  static void body(const void* context, std::int64_t first, std::int64_t last) {
    auto& self = *static_cast<Stuck*>(const_cast<void*>(context));
    while (first == 0 && self.done < 99) pass_by(20);
    self.done += static_cast<int>(last - first);
  }
};

static void shares_are_taken_over() {
  Pool pool(2);
  Stuck stuck;
  check(pool.run(100, 1, true, Stuck::body, &stuck) == lowbit::OK && stuck.done == 100, "shares are taken over");
}

// Workers that take long: the caller sleeps until they have left, and finds everything done.
static void slow_workers() {
  static thread_local bool caller;
  caller = true;
  Pool pool(4);
  const auto body = [](const void* context, std::int64_t first, std::int64_t last) {
    if (!caller) pass_by(300);
    Range::body(context, first, last);
  };
  for (int n = 0; n < 30; ++n) {
    Range range(16);
    pool.run(16, 1, true, body, &range);
    check(range.covered_once(), "a call ends when all its chunks are done");
  }
}

// A body may call the pool that runs it.
static void calls_inside_calls() {
  Pool pool(3);
  struct Nest {
    Pool* pool;
    std::atomic<int> wrong{0};
  } nest{&pool};
  const auto body = [](const void* context, std::int64_t, std::int64_t) {
    auto& self = *static_cast<Nest*>(const_cast<void*>(context));
    if (!covers(*self.pool, 40, 3, true)) ++self.wrong;
  };
  check(pool.run(30, 1, true, body, &nest) == lowbit::OK && nest.wrong == 0, "a body may call its pool");
}

// Several threads call at once, with pauses in which the workers fall asleep; in every other round the pool is
// stopped under them, by two threads at a time. A call either does all of its work, or is refused and does nothing.
static void callers_at_once() {
  for (int round = 0; round < 12; ++round) {
    Pool pool(4);
    std::vector<std::thread> callers;
    for (int n = 0; n < 3; ++n)
      callers.emplace_back([&pool, n] {
        for (int call = 0; call < 40; ++call) {
          Range range(500);
          const Status status = pool.run(500, 1 + call % 7 * 16, (call + n) % 3, Range::body, &range);
          const bool untouched = std::count(range.times.begin(), range.times.end(), 0) == 500;
          check(status == lowbit::OK ? range.covered_once() : status == lowbit::CLOSED && untouched, "all or nothing");
          if (call % 8 == 0) pass_by(200);
        }
      });
    if (round % 2) {
      pass_by(round * 40);
      std::thread other([&pool] { pool.stop(); });
      pool.stop();
      check(!covers(pool, 10, 1, true), "a stopped pool refuses calls");
      other.join();
    }
    for (std::thread& caller : callers) caller.join();
  }
}

// Many pools that come and go, used or not.
static void short_lives() {
  for (int n = 0; n < 60; ++n) {
    Pool pool(1 + n % 4);
    if (n % 3) check(covers(pool, 20, 1, n % 2), "a new pool works at once");
    if (n % 5 == 0) pool.stop();
  }
}

// The threads of a team: how many there are, and that each number below that is one of them.
struct Team {
  std::atomic<int> size{0}, numbers{0};
  static void run(const void* context, int thread, int threads) {
    auto& self = *static_cast<Team*>(const_cast<void*>(context));
    self.size.store(threads);
    check((self.numbers.fetch_or(1 << thread) & 1 << thread) == 0, "no two threads of a team have one number");
  }
};

// Workers sleep at first, so they come late: to a caller that waits for a minute all of them come.
static void teams() {
  for (int threads : {1, 2, 4})
    for (std::chrono::nanoseconds patience : {std::chrono::seconds(60), std::chrono::seconds(0)}) {
      Pool pool(threads);
      pass_by(2000);
      Team team;
      check(pool.together(Team::run, &team, patience) == lowbit::OK, "a team does its work");
      check(team.numbers.load() == (1 << team.size.load()) - 1, "the numbers of a team are those below its size");
      if (patience.count() > 0) check(team.size.load() == threads, "who waits gets all workers");
    }
}

// Workers may use every processor but the caller's, wherever that is at the time of the call; where there is only one,
// they use that one.
static void callers_and_workers_are_apart() {
#if defined(__linux__)
  cpu_set_t all, one;
  check(::sched_getaffinity(0, sizeof all, &all) == 0, "the processors can be asked for");
  const auto seen_by_worker = [](const void* context, int thread, int) {
    if (thread != 0) ::sched_getaffinity(0, sizeof(cpu_set_t), static_cast<cpu_set_t*>(const_cast<void*>(context)));
  };
  Pool pool(2);
  std::vector<std::unique_ptr<Pool>> bound;  // with a worker that may use one processor only
  std::vector<cpu_set_t> places;
  const auto run_on = [&](int caller) {
    CPU_ZERO(&one);
    CPU_SET(caller, &one);
    ::sched_setaffinity(0, sizeof one, &one);
  };
  for (int caller = 0; caller < CPU_SETSIZE; ++caller)
    if (CPU_ISSET(caller, &all)) {
      run_on(caller);
      bound.push_back(std::make_unique<Pool>(2)), places.push_back(one);
    }
  for (int caller = 0; caller < CPU_SETSIZE; ++caller) {
    if (!CPU_ISSET(caller, &all)) continue;
    run_on(caller);
    cpu_set_t seen, others = all;
    pool.together(seen_by_worker, &seen, std::chrono::seconds(20));
    CPU_CLR(caller, &others);
    check(CPU_EQUAL(&seen, CPU_COUNT(&others) ? &others : &all), "a worker is kept off the caller's processor only");
    for (std::size_t n = 0; n < bound.size(); ++n) {
      bound[n]->together(seen_by_worker, &seen, std::chrono::seconds(20));
      check(CPU_EQUAL(&seen, &places[n]), "a worker that may use one processor keeps it");
    }
  }
  ::sched_setaffinity(0, sizeof all, &all);
#endif
}

// Calls of four chunks of 20 us, by whichever threads take part.
struct Visits {
  std::thread::id caller = std::this_thread::get_id();
  std::atomic<bool> worker{false};

  static void body(const void* context, std::int64_t, std::int64_t) {
    auto& self = *static_cast<Visits*>(const_cast<void*>(context));
    if (std::this_thread::get_id() != self.caller) self.worker = true;
    const auto end = std::chrono::steady_clock::now() + std::chrono::microseconds(20);
    while (std::chrono::steady_clock::now() < end) {
    }
  }
  bool joined(Pool& pool) {
    worker = false;
    pool.run(4, 1, false, body, this);
    return worker;
  }
};

// Small calls that do not ask for workers. Those of a new pool are still watching, and take part in the first.
static void series_of_calls() {
  Pool pool(2);
  Visits visits;
  int joined = 0;
  for (int call = 0; call < 60; ++call) {
    pass_by(3000);
    joined += visits.joined(pool);
  }
  check(joined < 20, "calls that are far apart wake nobody");
  joined = 0;
  for (int call = 0; call < 5000 && joined < 20; ++call) joined += visits.joined(pool);
  check(joined == 20, "calls that follow one another wake the workers");
}

int main() {
  teams();
  callers_and_workers_are_apart();
  every_index_once();
  very_many_indices();
  shares();
  shares_are_taken_over();
  slow_workers();
  calls_inside_calls();
  callers_at_once();
  short_lives();
  series_of_calls();
  std::puts("held");
}
