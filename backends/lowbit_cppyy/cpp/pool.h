// A pool of threads that ends with its owner.
//
// One call of `run` cuts a range into chunks. The caller takes chunks at once, and so does every worker that has woken
// up by then; a worker that is late finds nothing left and is not waited for. So a small call never pays for a slow
// wake-up, and which thread computes a chunk never changes what is computed.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <mutex>
#include <shared_mutex>
#include <system_error>
#include <thread>
#include <vector>

#include <unistd.h>

namespace lowbit {

enum Status { OK = 0, NO_MEMORY = 1, FORKED = 2, CLOSED = 3 };

class Pool {
 public:
  // Calls `body(context, first, last)` for chunks that together cover the range once.
  using Body = void (*)(const void* context, std::int64_t first, std::int64_t last);

  // `threads` counts the caller: one thread means no workers. Where the system refuses a thread, fewer are used.
  explicit Pool(int threads) : owner_(::getpid()) {
    try {
      for (int n = 1; n < threads; ++n) workers_.emplace_back([this] { serve(); });
    } catch (const std::system_error&) {
    }
    threads_ = 1 + static_cast<int>(workers_.size());
  }

  // Never runs in a forked child, which has none of the threads (see `destroy_pool`).
  ~Pool() { stop(); }

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int threads() const { return threads_; }

  // A child of fork has a copy of this object and none of its threads.
  bool forked() const { return ::getpid() != owner_; }

  // Covers 0 .. count in chunks of `grain`. Several threads may call this at once: the first has the workers, the
  // others compute alone. Workers that watch for work always take part; whether those that sleep are woken, the
  // caller decides, because waking them takes time before it saves any.
  Status run(std::int64_t count, std::int64_t grain, bool wake, Body body, const void* context) {
    if (forked()) return FORKED;
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    const std::shared_lock<std::shared_mutex> call(calls_);
    if (stopped_.load(std::memory_order_acquire)) return CLOSED;
    std::unique_lock<std::mutex> mine(busy_, std::defer_lock);
    if (workers_.empty() || count <= grain || !mine.try_lock()) {
      body(context, 0, count);
      return OK;
    }
    bool asleep;
    {
      std::lock_guard<std::mutex> guard(mutex_);
      body_ = body, context_ = context, count_ = count, grain_ = grain;
      next_.store(0, std::memory_order_relaxed);
      open_ = true;
      job_.fetch_add(1, std::memory_order_release);
      asleep = sleepers_ > 0;
    }
    if (asleep && wake) wake_.notify_all();
    take_chunks();
    wait_briefly([this] { return inside_.load(std::memory_order_acquire) == 0; });
    std::unique_lock<std::mutex> guard(mutex_);
    open_ = false;
    done_.wait(guard, [this] { return inside_.load(std::memory_order_relaxed) == 0; });
    return OK;
  }

  // Refuses new calls, waits for those under way and ends the workers. Calling it twice, or in a forked child, is
  // harmless.
  void stop() {
    if (forked()) return;
    stopped_.store(true, std::memory_order_release);
    const std::unique_lock<std::shared_mutex> nobody(calls_);
    {
      std::lock_guard<std::mutex> guard(mutex_);  // no worker is now between looking and falling asleep
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
    workers_.clear();
  }

 private:
  // How long a thread watches for work before it sleeps: about the time between the layers of a running model, so that
  // their small calls need not wake it (measured: waking costs the caller some 15 µs, and takes 40 µs). While it
  // watches, it gives its processor to any thread that wants it.
  static constexpr std::chrono::microseconds patience{100};

  template <class Condition>
  static void wait_briefly(Condition condition) {
    const auto deadline = std::chrono::steady_clock::now() + patience;
    while (!condition() && std::chrono::steady_clock::now() < deadline) {
      std::this_thread::yield();  // the thread that is waited for may need this very processor
    }
  }

  void take_chunks() {
    for (;;) {
      const std::int64_t first = next_.fetch_add(grain_, std::memory_order_relaxed);
      if (first >= count_) return;
      body_(context_, first, first + grain_ < count_ ? first + grain_ : count_);
    }
  }

  void serve() {
    std::uint64_t seen = 0;
    bool worked = false;
    for (;;) {
      const auto news = [&] { return job_.load(std::memory_order_acquire) != seen || stopped_.load(); };
      if (worked) wait_briefly(news);
      std::unique_lock<std::mutex> guard(mutex_);
      ++sleepers_;
      wake_.wait(guard, news);
      --sleepers_;
      if (stopped_.load()) return;
      seen = job_.load(std::memory_order_relaxed);
      worked = open_;
      if (!worked) continue;  // too late: the others have done it all. Sleep again at once
      inside_.fetch_add(1, std::memory_order_relaxed);
      guard.unlock();
      take_chunks();
      guard.lock();
      if (inside_.fetch_sub(1, std::memory_order_release) == 1 && !open_) done_.notify_one();
    }
  }

  const ::pid_t owner_;
  int threads_ = 1;
  std::vector<std::thread> workers_;

  std::shared_mutex calls_;  // shared by all calls under way
  std::mutex busy_;  // held by the one of them that has the workers
  std::mutex mutex_;  // guards everything below
  std::condition_variable wake_, done_;
  int sleepers_ = 0;
  bool open_ = false;  // whether the job may still be entered
  Body body_ = nullptr;
  const void* context_ = nullptr;
  std::int64_t count_ = 0, grain_ = 1;

  // These are also read without the mutex, by threads that watch before they sleep.
  std::atomic<std::uint64_t> job_{0};
  std::atomic<int> inside_{0};  // workers in the job
  std::atomic<bool> stopped_{false};
  std::atomic<std::int64_t> next_{0};
};

}  // namespace lowbit
