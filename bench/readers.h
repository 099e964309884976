// Plain readers: how fast memory can be read when nothing is computed. The fastest of them is the limit that a kernel
// is measured against.
#pragma once

#include <cstddef>
#include <cstdint>

#include <immintrin.h>

namespace lowbit::bench {

// One running sum in scalar code; the compiler may vectorise it as it likes.
inline std::uint64_t read_plain(const std::uint64_t* p, std::int64_t words) {
  std::uint64_t sum = 0;
  for (std::int64_t i = 0; i < words; ++i) sum += p[i];
  return sum;
}

// Eight independent registers of 256 bits, so that no load waits for an addition.
__attribute__((target("avx2"))) inline std::uint64_t read_avx2(const std::uint64_t* p, std::int64_t words) {
  __m256i sum[8];
  for (auto& s : sum) s = _mm256_setzero_si256();
  std::int64_t i = 0;
  for (; i + 32 <= words; i += 32)
    for (int k = 0; k < 8; ++k)
      sum[k] = _mm256_add_epi64(sum[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 4 * k)));
  for (int k = 1; k < 8; ++k) sum[0] = _mm256_add_epi64(sum[0], sum[k]);
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + read_plain(p + i, words - i);
}

// The same with the line four kilobytes ahead asked for early.
__attribute__((target("avx2"))) inline std::uint64_t read_ahead(const std::uint64_t* p, std::int64_t words) {
  __m256i sum[8];
  for (auto& s : sum) s = _mm256_setzero_si256();
  std::int64_t i = 0;
  for (; i + 32 <= words; i += 32) {
    for (int line = 0; line < 4; ++line)
      _mm_prefetch(reinterpret_cast<const char*>(p + i + 512 + 8 * line), _MM_HINT_T0);
    for (int k = 0; k < 8; ++k)
      sum[k] = _mm256_add_epi64(sum[k], _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p + i + 4 * k)));
  }
  for (int k = 1; k < 8; ++k) sum[0] = _mm256_add_epi64(sum[0], sum[k]);
  alignas(32) std::uint64_t lanes[4];
  _mm256_store_si256(reinterpret_cast<__m256i*>(lanes), sum[0]);
  return lanes[0] + lanes[1] + lanes[2] + lanes[3] + read_plain(p + i, words - i);
}

struct Reading {
  const std::uint64_t* from;
  int which;
  std::uint64_t sums[1024];  // one a chunk, so that nothing is optimised away and no thread writes where another does
  std::int64_t chunk;
};

inline void read_chunk(const void* context, std::int64_t first, std::int64_t last) {
  Reading& reading = *const_cast<Reading*>(static_cast<const Reading*>(context));
  const std::uint64_t* const from = reading.from + first;
  const std::int64_t words = last - first;
  std::uint64_t& sum = reading.sums[(first / reading.chunk) % 1024];
  if (reading.which == 0) sum = read_plain(from, words);
  if (reading.which == 1) sum = read_avx2(from, words);
  if (reading.which == 2) sum = read_ahead(from, words);
}

// Read `words` eight-byte words by the threads of a pool; the result depends on every one of them.
inline std::uint64_t read(lowbit::Pool& pool, const std::uint64_t* from, std::int64_t words, int which) {
  Reading reading{from, which, {}, (words + 4 * pool.threads() - 1) / (4 * pool.threads())};
  pool.run(words, reading.chunk, true, read_chunk, &reading);
  std::uint64_t sum = 0;
  for (const std::uint64_t part : reading.sums) sum += part;
  return sum;
}

inline void spin_chunk(const void* context, std::int64_t first, std::int64_t last) {
  double x = 1.0;
  for (std::int64_t i = first; i < last; ++i) x = x * 1.0000001 + 1e-9;
  const_cast<volatile double*>(static_cast<const volatile double*>(context))[first % 64] = x;
}

// Arithmetic that no other core can slow down: whether the threads have a core each.
inline void spin(lowbit::Pool& pool, std::int64_t steps) {
  double sink[64] = {};
  pool.run(steps, steps / pool.threads(), true, spin_chunk, sink);
}

}  // namespace lowbit::bench
