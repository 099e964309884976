// Plain readers: how fast memory can be read when nothing is computed. The fastest of them is the limit that a kernel
// is measured against.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include <immintrin.h>

#include "placement.h"  // of lowbit_cppyy

namespace lowbit::bench {

// Threads that begin together, none on the processor of the caller. The clock starts when all of them stand ready, so it
// counts no waking up, and stops when the last is done. Between two calls they sleep, and so take no core from what is
// measured next.
class Gang {
 public:
  using Body = void (*)(void* context, int thread);

  explicit Gang(int threads) : threads_(threads) {
    for (int n = 1; n < threads; ++n) workers_.emplace_back([this, n] { serve(n); });
  }

  ~Gang() {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      stopped_ = true;
    }
    wake_.notify_all();
    for (std::thread& worker : workers_) worker.join();
  }

  Gang(const Gang&) = delete;
  Gang& operator=(const Gang&) = delete;

  int threads() const { return threads_; }

  // Seconds that `body` took on all threads together.
  double run(Body body, void* context) {
    {
      std::lock_guard<std::mutex> guard(mutex_);
      body_ = body, context_ = context;
      ready_ = 0, done_ = 0;
      go_.store(false);
      ++job_;
    }
    separation_.from_caller(workers_);
    wake_.notify_all();
    while (ready_.load() < threads_ - 1) std::this_thread::yield();
    const auto start = std::chrono::steady_clock::now();
    go_.store(true);
    body(context, 0);
    while (done_.load() < threads_ - 1) std::this_thread::yield();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  }

 private:
  void serve(int number) {
    std::int64_t seen = 0;
    for (;;) {
      {
        std::unique_lock<std::mutex> guard(mutex_);
        wake_.wait(guard, [&] { return stopped_ || job_ != seen; });
        if (stopped_) return;
        seen = job_;
      }
      ready_.fetch_add(1);
      while (!go_.load()) std::this_thread::yield();
      body_(context_, number);
      done_.fetch_add(1);
    }
  }

  const int threads_;
  std::vector<std::thread> workers_;
  Separation separation_;
  std::mutex mutex_;
  std::condition_variable wake_;
  bool stopped_ = false;
  std::int64_t job_ = 0;
  Body body_ = nullptr;
  void* context_ = nullptr;
  std::atomic<int> ready_{0}, done_{0};
  std::atomic<bool> go_{false};
};

// One running sum in scalar code; the compiler may vectorise it as it likes.
inline std::uint64_t read_plain(const std::uint64_t* p, std::int64_t words) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < words; ++i) sum += p[i];
  return sum;
}

constexpr int eight_pages = -1;  // instead of a distance

// Asks for the line `Ahead` bytes after `a`, or for one of eight pages, as kernels do (prefetching.py).
template <int Ahead>
inline void ask(const void* a) {
  const auto place = reinterpret_cast<std::uintptr_t>(a) + (Ahead == eight_pages ? 4096 : Ahead);
  const auto pages = Ahead == eight_pages ? ~place % 4096 / 512 : 0;
  if (Ahead != 0) _mm_prefetch(reinterpret_cast<const char*>(place + 4096 * pages), _MM_HINT_T0);
}

// Eight registers, each with a sum of its own, so that no load waits for an addition. The piece is cut into `Streams`
// parts that are read in step, a line or more of each in turn; `Ahead` bytes ahead of each, lines are asked for early.
template <int Streams, int Ahead>
__attribute__((target("avx2"))) std::uint64_t read_avx2(const std::uint64_t* p, std::int64_t words) {
  constexpr int depth = 8 / Streams, step = 4 * depth;
  const std::int64_t length = words / Streams / step * step;
  __m256i sum[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = _mm256_setzero_si256();
  for (std::int64_t i = 0; i < length; i += step) {
#pragma unroll
    for (int s = 0; s < Streams; ++s) {
      const std::uint64_t* const from = p + s * length + i;
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        if (d % 2 == 0) ask<Ahead>(from + 4 * d);
        const __m256i loaded = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + 4 * d));
        sum[s * depth + d] = _mm256_add_epi64(sum[s * depth + d], loaded);
      }
    }
  }
#pragma unroll
  for (int k = 1; k < 8; ++k) sum[0] = _mm256_add_epi64(sum[0], sum[k]);
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + read_plain(p + Streams * length, words - Streams * length);
}

// The same with registers of 512 bits, a line each.
template <int Streams, int Ahead>
__attribute__((target("avx512f"))) std::uint64_t read_avx512(const std::uint64_t* p, std::int64_t words) {
  constexpr int depth = 8 / Streams, step = 8 * depth;
  const std::int64_t length = words / Streams / step * step;
  __m512i sum[8];
#pragma unroll
  for (int k = 0; k < 8; ++k) sum[k] = _mm512_setzero_si512();
  for (std::int64_t i = 0; i < length; i += step) {
#pragma unroll
    for (int s = 0; s < Streams; ++s) {
      const std::uint64_t* const from = p + s * length + i;
#pragma unroll
      for (int d = 0; d < depth; ++d) {
        ask<Ahead>(from + 8 * d);
        sum[s * depth + d] = _mm512_add_epi64(sum[s * depth + d], _mm512_loadu_si512(from + 8 * d));
      }
    }
  }
#pragma unroll
  for (int k = 1; k < 8; ++k) sum[0] = _mm512_add_epi64(sum[0], sum[k]);
  alignas(64) std::uint64_t lanes[8];
  _mm512_store_si512(lanes, sum[0]);
  std::uint64_t total = 0;
  for (const std::uint64_t lane : lanes) total += lane;
  return total + read_plain(p + Streams * length, words - Streams * length);
}

using Reader = std::uint64_t (*)(const std::uint64_t*, std::int64_t);

// In the order of `READERS` in limits.py, which names them.
constexpr Reader readers[] = {
    read_plain,
    read_avx2<1, 0>, read_avx2<1, 4096>, read_avx2<4, 0>, read_avx2<4, 4096>, read_avx2<1, eight_pages>,
    read_avx512<1, 0>, read_avx512<1, 4096>, read_avx512<2, 0>, read_avx512<2, 4096>,
    read_avx512<4, 0>, read_avx512<4, 2048>, read_avx512<8, 0>, read_avx512<8, 2048>,
    read_avx512<1, eight_pages>,
};

struct Reading {
  const std::uint64_t* from;
  std::int64_t words, chunk;  // chunk 0: one piece for each thread
  Reader reader;
  int threads;
  std::atomic<std::int64_t> next{0};
  std::atomic<std::uint64_t> total{0};
};

inline void read_share(void* context, int thread) {
  Reading& reading = *static_cast<Reading*>(context);
  std::uint64_t sum = 0;
  if (reading.chunk == 0) {
    const std::int64_t first = reading.words * thread / reading.threads;
    sum = reading.reader(reading.from + first, reading.words * (thread + 1) / reading.threads - first);
  } else {
    for (;;) {
      const std::int64_t first = reading.next.fetch_add(reading.chunk);
      if (first >= reading.words) break;
      const std::int64_t last = first + reading.chunk < reading.words ? first + reading.chunk : reading.words;
      sum += reading.reader(reading.from + first, last - first);
    }
  }
  reading.total.fetch_add(sum);
}

// Seconds to read `words` words of ones; negative if not every one of them was read.
inline double read(Gang& gang, const std::uint64_t* from, std::int64_t words, int which, std::int64_t chunk) {
  Reading reading{from, words, chunk, readers[which], gang.threads()};
  const double seconds = gang.run(read_share, &reading);
  return reading.total.load() == static_cast<std::uint64_t>(words) ? seconds : -1.0;
}

}  // namespace lowbit::bench
