// A pool of threads that ends with its owner.
//
// A call of `together` runs one function in several threads at once. A call of `run` divides a range into chunks and
// gives every thread a share of adjacent chunks, so that each reads one long stretch of memory. A thread takes chunks
// from the front of its share. When its share is done, it steals the back half of what remains of another share. The
// caller begins immediately, as does every worker that is awake by then. A late worker finds its share stolen, and no
// thread waits for it. So a slow wake-up never delays a small call. The result does not depend on the thread that
// computes a chunk. Between calls the workers sleep.
#pragma once

#include <algorithm>
#include <atomic>
#include <cfenv>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <exception>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <thread>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include "parking.h"
#include "placement.h"

namespace lowbit {

enum Status { OK = 0, NO_MEMORY = 1, FORKED = 2, CLOSED = 3, INEXACT = 4, STRANGE = 5 };

// During its lifetime, this thread and those that it starts block all signals except those raised by their own faults.
// Signals from outside belong to the threads of the host program, whose handlers may not expect other threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t others;
    sigfillset(&others);
    for (int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&others, own);
    pthread_sigmask(SIG_BLOCK, &others, &before_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

// During its lifetime, this thread rounds to nearest, keeps subnormal numbers and traps nothing, whatever mode the host
// program has set. So results depend neither on that mode nor on the thread that computes them. Afterwards the
// program's mode and exception flags are restored.
class StandardArithmetic {
 public:
#if defined(__SSE__)
  StandardArithmetic() : before_(__builtin_ia32_stmxcsr()) { __builtin_ia32_ldmxcsr(0x1F80); }
  ~StandardArithmetic() { __builtin_ia32_ldmxcsr(before_); }
#else
  StandardArithmetic() { std::fegetenv(&before_), std::fesetenv(FE_DFL_ENV); }
  ~StandardArithmetic() { std::fesetenv(&before_); }
#endif
  StandardArithmetic(const StandardArithmetic&) = delete;
  StandardArithmetic& operator=(const StandardArithmetic&) = delete;

 private:
#if defined(__SSE__)
  unsigned before_;
#else
  std::fenv_t before_;
#endif
};

class Pool {
 public:
  // Calls `body(context, first, last)` for chunks that together cover the range once. It must not throw.
  using Body = void (*)(const void* context, std::int64_t first, std::int64_t last);
  // Calls `team(context, thread, threads)` in several threads at the same time. It must not throw.
  using Team = void (*)(const void* context, int thread, int threads);

  // `threads` counts the caller: one thread means no workers. If the system refuses a thread, fewer are used. The
  // workers get the affinity that the creating thread has at that moment, without the processor on which the caller
  // runs; later changes do not move them.
  explicit Pool(int threads) : owner_(::getpid()), shares_(new Share[std::max(threads, 1)]) {
    workers_.reserve(std::max(threads, 1));
    const SignalsBlocked blocked;
    try {
      for (int n = 1; n < threads; ++n) workers_.emplace_back([this, n] { serve(n); });
    } catch (const std::exception&) {
    }
    threads_ = 1 + static_cast<int>(workers_.size());
  }

  // Does not run in a forked child, which has none of the threads (see `destroy_pool`).
  ~Pool() { stop(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // A child of fork has a copy of this object and none of its threads.
  bool forked() const { return ::getpid() != owner_; }

  // Covers 0 .. count in chunks of `grain`. Several threads, and a body, may call this at once: the first gets the
  // workers, the others compute alone. Workers that spin for work always take part. Waking sleeping workers costs time
  // before it saves any. So they are woken if the caller asks for it, or if the call is one of a series, in which
  // workers that are awake stay awake.
  Status run(std::int64_t count, std::int64_t grain, bool wake, Body body, const void* context) {
    if (forked()) return FORKED;
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    const std::shared_lock<std::shared_mutex> call(calls_);
    const StandardArithmetic arithmetic;
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    if (workers_.empty() || count <= grain || busy_.exchange(true, std::memory_order_acquire)) {
      body(context, 0, count);
      return OK;
    }
    const bool asleep = sleepers_.load(std::memory_order_relaxed) == static_cast<int>(workers_.size());
    if (asleep && !wake && !in_series()) {
      body(context, 0, count);  // no worker will take part, so the range is not divided
      ended_ = std::chrono::steady_clock::now();
    } else {
      wake = wake || asleep;
      job_ = {body, nullptr, context, count, grain_for(count, grain)};
      cut();
      open(wake, static_cast<int>(std::min<std::int64_t>((count - 1) / job_.grain, INT_MAX)));
      take_chunks(0);
      close();
    }
    busy_.store(false, std::memory_order_release);
    return OK;
  }

  // Calls `team` once in each of several threads, which may wait for one another: the caller and the workers that
  // arrive in time. It is for long work of many parts, between which the threads stay awake. If another thread uses the
  // workers, the caller runs alone. `patience` is the time that it waits for the workers.
  Status together(Team team, const void* context, std::chrono::nanoseconds patience) {
    if (forked()) return FORKED;
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    const std::shared_lock<std::shared_mutex> call(calls_);
    const StandardArithmetic arithmetic;
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    if (workers_.empty() || busy_.exchange(true, std::memory_order_acquire)) {
      team(context, 0, 1);
      return OK;
    }
    const std::uint32_t workers = static_cast<std::uint32_t>(workers_.size());
    job_ = {nullptr, team, context, 0, 0};
    came_.store(0, std::memory_order_relaxed), size_.store(0, std::memory_order_relaxed);
    open(true, static_cast<int>(workers));
    gather(workers, std::max<std::chrono::nanoseconds>(patience, least_patience));
    const int size = 1 + static_cast<int>(came_.fetch_or(too_late, std::memory_order_acq_rel));
    size_.store(size, std::memory_order_release);
    team(context, 0, size);
    close();
    busy_.store(false, std::memory_order_release);
    return OK;
  }

  // The grain in use: at least one, and large enough to count the chunks in 32 bits.
  static std::int64_t grain_for(std::int64_t count, std::int64_t grain) {
    return std::max({grain, count / (std::int64_t{1} << 31), std::int64_t{1}});
  }

  // Refuses new calls, waits for the current ones and ends the workers. Calling it twice, or in a forked child, is
  // harmless.
  void stop() {
    if (forked()) return;
    stopped_.store(true, std::memory_order_release);
    const std::unique_lock<std::shared_mutex> nobody(calls_);
    number_.value.fetch_add(1);
    number_.wake_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  // The time that a worker spins for the next call before it sleeps: more than passes from one call of a decoder or of a
  // series of products to the next, with Python, checks and casts of activations (5 to 100 µs). Waking a sleeping worker
  // costs the caller 5 to 15 µs, and the worker starts after 20 to 45 µs (virtual machine, 2 processors).
  static constexpr std::chrono::microseconds worker_patience{200};
  // The calls of a series that run alone before workers are woken for the others.
  static constexpr int series = 4;
  // The time that the caller, after its own chunks, spins for workers that still compute one: about the cost of
  // sleeping and being woken, so that it loses at most that much again.
  static constexpr std::chrono::microseconds caller_patience{20};

  // The least time that the caller of `together` waits for workers to arrive: more than waking one usually takes. Tests
  // that look for races choose a long time, so that all workers arrive.
#ifndef LOWBIT_GATHERING
#define LOWBIT_GATHERING 100
#endif
  static constexpr std::chrono::microseconds least_patience{LOWBIT_GATHERING};
  // The time that the caller and its workers spin before they yield the processor to other threads, possibly to a
  // worker that waits for the same processor.
  static constexpr std::chrono::microseconds gathering_patience{100};

  struct Job {
    Body body;
    Team team;  // or nullptr
    const void* context;
    std::int64_t count, grain;
  };

  // The remaining chunks first .. last of a thread: `last` in the upper half, `first` in the lower.
  struct alignas(64) Share {
    std::atomic<std::uint64_t> range{0};
  };
  static std::uint64_t range(std::uint64_t first, std::uint64_t last) { return last << 32 | first; }
  static std::uint64_t first_of(std::uint64_t range) { return range & UINT32_MAX; }
  static std::uint64_t last_of(std::uint64_t range) { return range >> 32; }

  // The state of the job: workers inside, whether it may still be entered, whether the caller sleeps until all left.
  static constexpr std::uint32_t is_open = 1u << 31, caller_sleeps = 1u << 30, inside = caller_sleeps - 1;

  static constexpr std::uint32_t too_late = 1u << 31;  // of `came_`

  // Gives every thread its share of the chunks.
  void cut() {
    const std::uint64_t chunks = (job_.count - 1) / job_.grain + 1;
    const std::uint64_t threads = threads_, sharing = std::min(threads, chunks);
    for (std::uint64_t n = 0; n < threads; ++n) {
      const std::uint64_t share = std::min(n, sharing);  // past the last chunk, shares are empty
      const std::uint64_t next = std::min(n + 1, sharing);
      shares_[n].range.store(range(chunks * share / sharing, chunks * next / sharing), std::memory_order_relaxed);
    }
  }

  // Whether this call and the last few, which ran alone, follow one another so closely that workers stay awake between
  // them.
  bool in_series() {
    const bool soon = std::chrono::steady_clock::now() - ended_ < worker_patience;
    alone_ = soon ? alone_ + 1 : 0;
    return alone_ >= series;
  }

  void open(bool wake, int most) {
    separation_.from_caller(workers_);
    state_.value.store(is_open, std::memory_order_release);
    number_.value.fetch_add(1);  // before looking for sleepers: either they are seen here, or they see the new number
    if (wake && sleepers_.load() > 0) number_.wake(most);
  }

  void close() {
    std::uint32_t state = state_.value.fetch_and(~is_open, std::memory_order_acq_rel) & ~is_open;
    const auto all_left = [&] { return ((state = state_.value.load(std::memory_order_acquire)) & inside) == 0; };
    if (state == 0 || watch(caller_patience, all_left)) return;
    while (!all_left())
      if (state & caller_sleeps || state_.value.compare_exchange_strong(state, state | caller_sleeps))
        state_.sleep_while(state | caller_sleeps);
  }

  bool enter() {
    std::uint32_t state = state_.value.load(std::memory_order_relaxed);
    while (state & is_open)
      if (state_.value.compare_exchange_weak(state, state + 1, std::memory_order_acquire)) return true;
    return false;
  }

  void leave() {
    if (state_.value.fetch_sub(1, std::memory_order_acq_rel) == (caller_sleeps | 1)) state_.wake_all();
  }

  // Waits until all workers have joined a team, for at most this time.
  void gather(std::uint32_t workers, std::chrono::nanoseconds patience) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    const auto all_came = [&] { return came_.load(std::memory_order_relaxed) == workers; };
    while (!watch(gathering_patience, all_came) && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
  }

  // Takes part in a team, unless it has begun.
  void take_part() {
    const std::uint32_t before = came_.fetch_add(1, std::memory_order_acq_rel);
    if (before & too_late) return;
    int size = 0;
    while (!watch(gathering_patience, [&] { return (size = size_.load(std::memory_order_acquire)) != 0; }))
      std::this_thread::yield();
    job_.team(job_.context, 1 + static_cast<int>(before), size);
  }

  void take_chunks(int thread) {
    do {
      std::uint64_t mine = shares_[thread].range.load(std::memory_order_relaxed);
      while (first_of(mine) < last_of(mine)) {
        if (!shares_[thread].range.compare_exchange_weak(mine, mine + 1, std::memory_order_relaxed)) continue;
        const std::int64_t first = first_of(mine) * job_.grain;
        job_.body(job_.context, first, std::min(first + job_.grain, job_.count));
        mine = shares_[thread].range.load(std::memory_order_relaxed);
      }
    } while (take_over(thread));
  }

  // Steals the back half of another thread's share. Within one job no range occurs twice, so a range that compares
  // equal is the same.
  bool take_over(int thread) {
    for (int n = 1; n < threads_; ++n) {
      std::atomic<std::uint64_t>& other = shares_[(thread + n) % threads_].range;
      std::uint64_t theirs = other.load(std::memory_order_relaxed);
      while (first_of(theirs) < last_of(theirs)) {
        const std::uint64_t first = first_of(theirs), last = last_of(theirs), middle = first + (last - first) / 2;
        if (!other.compare_exchange_weak(theirs, range(first, middle), std::memory_order_relaxed)) continue;
        shares_[thread].range.store(range(middle, last), std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  }

  void serve(int thread) {
#if defined(__linux__)
    pthread_setname_np(pthread_self(), "lowbit");
#endif
    const StandardArithmetic arithmetic;
    for (std::uint32_t seen = 0;;) {
      const auto news = [&] { return number_.value.load() != seen; };
      if (!watch(worker_patience, news)) {
        sleepers_.fetch_add(1);
        while (!news()) number_.sleep_while(seen);
        sleepers_.fetch_sub(1);
      }
      if (stopped_.load(std::memory_order_acquire)) return;
      seen = number_.value.load();
      if (!enter()) continue;  // too late: the other threads have finished the job
      if (job_.team) take_part();
      else take_chunks(thread);
      leave();
    }
  }

  const ::pid_t owner_;
  int threads_ = 1;
  std::vector<std::thread> workers_;

  std::shared_mutex calls_;  // held shared by all current calls
  std::atomic<bool> busy_{false};  // whether one of them uses the workers
  std::atomic<bool> stopped_{false};

  // The data of the call that uses the workers; written while no worker is inside.
  Job job_{};
  Separation separation_;  // of the caller and the workers
  std::unique_ptr<Share[]> shares_;
  Word state_;
  Word number_;  // of the job; workers wait for it to change
  std::atomic<int> sleepers_{0};
  std::chrono::steady_clock::time_point ended_{};  // of the last call that ran alone while workers slept
  int alone_ = 0;                                  // such calls in a series
  std::atomic<std::uint32_t> came_{0};  // workers that joined a team; `too_late` once it has begun
  std::atomic<int> size_{0};            // of the team, the caller included; 0 until it begins
};

}  // namespace lowbit
