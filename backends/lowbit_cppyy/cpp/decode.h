// What stands between two linear layers of a decode step: passes over rows (pieces.py), put together to operations.
//
// A pass works on `turn` elements at a time; what is left over of a row goes through it in a buffer. Rows, tokens and
// heads are split between threads; no result depends on how.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "linear.h"

namespace lowbit {

constexpr std::int64_t turn = 64;
constexpr std::int64_t exponential_work = 16;  // what an exponential takes, in multiply-adds

// The kernels of one operation, in the order in which it names them, and its threads.
struct Passes {
  Pool* pool;
  MicroKernel call[8];
};

inline const std::uint32_t* elements(const float* a) { return reinterpret_cast<const std::uint32_t*>(a); }

inline void pass(MicroKernel kernel, std::int64_t turns, const float* w, const float* s, const float* x, float* y) {
  kernel(elements(w), elements(s), nullptr, x, y, Sizes{turns, turns, nullptr, nullptr, nullptr});
}

// Result by result: y = f(w, s), with numbers for all at x. `s` may be nullptr, and y may be w.
inline void each(MicroKernel kernel, const float* x, const float* w, const float* s, std::int64_t n, float* y) {
  const std::int64_t whole = n / turn * turn, rest = n - whole;
  if (whole > 0) pass(kernel, whole / turn, w, s, x, y);
  if (rest == 0) return;
  alignas(64) float first[turn] = {}, second[turn] = {}, result[turn];
  std::memcpy(first, w + whole, rest * sizeof(float));
  if (s) std::memcpy(second, s + whole, rest * sizeof(float));
  pass(kernel, 1, first, second, x, result);
  std::memcpy(y + whole, result, rest * sizeof(float));
}

// All folded into one: by the kernel into `turn` numbers, each of which begins as `none`, and these by halves.
template <class Fold>
inline float folded(MicroKernel kernel, const float* w, std::int64_t n, float none, Fold two) {
  alignas(64) float many[turn], last[turn];
  std::fill_n(many, turn, none);
  const std::int64_t whole = n / turn * turn, rest = n - whole;
  if (whole > 0) pass(kernel, whole / turn, w, nullptr, nullptr, many);
  if (rest > 0) {
    std::fill_n(last, turn, none);
    std::memcpy(last, w + whole, rest * sizeof(float));
    pass(kernel, 1, last, nullptr, nullptr, many);
  }
  for (std::int64_t half = turn / 2; half > 0; half /= 2)
    for (std::int64_t i = 0; i < half; ++i) many[i] = two(many[i], many[i + half]);
  return many[0];
}

inline float sum(MicroKernel kernel, const float* w, std::int64_t n) {
  return folded(kernel, w, n, 0.0f, [](float a, float b) { return a + b; });
}

inline float largest(MicroKernel kernel, const float* w, std::int64_t n) {
  constexpr float none = -std::numeric_limits<float>::infinity();
  return folded(kernel, w, n, none, [](float a, float b) { return a > b ? a : b; });
}

// Calls body(first, last) for parts of a range, by several threads where that is worth it. `work` is what one of the
// range takes, in multiply-adds.
template <class Body> Status spread(Pool& pool, std::int64_t count, std::int64_t work, const Body& body) {
  const auto call = [](const void* context, std::int64_t first, std::int64_t last) {
    (*static_cast<const Body*>(context))(first, last);
  };
  const std::int64_t fair = count / (pool.threads() * chunks_per_thread), worth = chunk_work / work + 1;
  return pool.run(count, std::max(fair, worth), count * work >= wake_work, call, &body);
}

// RMSNorm of a row whose squares may sum to more than float32 holds, or to what is no number at all: in float64, where
// squares of float32 and their sums cannot overflow. Here no instruction set makes a difference: squares are exact.
inline void rms_norm_wide(const float* x, const float* gain, float epsilon, std::int64_t n, float* out) {
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + epsilon);
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * factor * gain[i]);
}

// squares, normed
inline Status rms_norm(const Passes& passes, const float* x, const float* gain, float epsilon, std::int64_t rows,
                       std::int64_t n, float* out) {
  return spread(*passes.pool, rows, 2 * n, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      const float* const row = x + t * n;
      const float mean = sum(passes.call[0], row, n) / static_cast<float>(n) + epsilon;
      const float factor = 1 / std::sqrt(mean);
      if (mean <= FLT_MAX) each(passes.call[1], &factor, row, gain, n, out + t * n);
      else rms_norm_wide(row, gain, epsilon, n, out + t * n);
    }
  });
}

// gated
inline Status swiglu(const Passes& passes, const float* gate, const float* up, std::int64_t count, float* out) {
  const std::int64_t turns = (count + turn - 1) / turn;
  return spread(*passes.pool, turns, turn * exponential_work, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t start = first * turn, stop = std::min(last * turn, count);
    each(passes.call[0], nullptr, gate + start, up + start, stop - start, out + start);
  });
}

// largest, exponentials, sums, scaled
inline Status softmax(const Passes& passes, const float* scores, std::int64_t rows, std::int64_t n, float* out) {
  return spread(*passes.pool, rows, n * exponential_work, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      float* const row = out + t * n;
      const float minus = -largest(passes.call[0], scores + t * n, n);
      each(passes.call[1], &minus, scores + t * n, nullptr, n, row);
      const float factor = 1 / sum(passes.call[2], row, n);
      each(passes.call[3], &factor, row, nullptr, n, row);
    }
  });
}

namespace bridge {

// What Python calls. Like those of bridge.h, each does nothing where there is nothing to do, whatever the addresses.

inline std::uintptr_t create_passes(std::uintptr_t pool, const std::uint64_t* kernels, int count) {
  Passes* const passes = new Passes{reinterpret_cast<Pool*>(pool), {}};
  for (int n = 0; n < count; ++n) passes->call[n] = reinterpret_cast<MicroKernel>(kernels[n]);
  return reinterpret_cast<std::uintptr_t>(passes);
}

inline void destroy_passes(std::uintptr_t passes) { delete at<Passes>(passes); }

inline int rms_norm(std::uintptr_t passes, const float* x, const float* gain, float epsilon, std::int64_t rows,
                    std::int64_t n, float* out) {
  return rows == 0 ? OK : lowbit::rms_norm(*at<Passes>(passes), x, gain, epsilon, rows, n, out);
}

inline int swiglu(std::uintptr_t passes, const float* gate, const float* up, std::int64_t count, float* out) {
  return count == 0 ? OK : lowbit::swiglu(*at<Passes>(passes), gate, up, count, out);
}

inline int softmax(std::uintptr_t passes, const float* scores, std::int64_t rows, std::int64_t n, float* out) {
  return rows == 0 ? OK : lowbit::softmax(*at<Passes>(passes), scores, rows, n, out);
}

}  // namespace bridge
}  // namespace lowbit
