// What stands between two linear layers of a decode step: passes over rows (pieces.py), put together to operations.
//
// A pass works on `turn` elements at a time; what is left over of a row goes through it in a buffer. Rows, tokens and
// heads are split between threads; no result depends on how.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "bridge.h"

namespace lowbit {

constexpr std::int64_t turn = 64;
constexpr std::int64_t exponential_work = 16;  // what an exponential takes, in multiply-adds

// The kernels of one operation, in the order in which it names them, and its threads.
struct Passes {
  Pool* pool;
  std::int64_t lanes;     // of their registers
  std::int64_t channels;  // of a head that are mixed at once
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

// turned
inline Status rotate(const Passes& passes, const float* x, const double* cosines, const double* sines,
                     const std::int64_t* partners, std::int64_t tokens, std::int64_t heads, std::int64_t d,
                     float* out) {
  if (std::any_of(partners, partners + d, [&](std::int64_t c) { return c < 0 || c >= d; })) return STRANGE;
  const std::int64_t padded = (d + turn - 1) / turn * turn;
  std::atomic<bool> failed{false};
  const Status status = spread(*passes.pool, tokens, 4 * heads * d, [&](std::int64_t first, std::int64_t last) {
    const Scratch room = scratch(5 * padded * sizeof(float));
    if (!room) return failed.store(true);
    float* const both = static_cast<float*>(room.get());  // cosines and sines by turns
    float *const own = both + 2 * padded, *const partner = own + padded, *const result = partner + padded;
    std::fill_n(both, 5 * padded, 0.0f);
    for (std::int64_t t = first; t < last; ++t) {
      for (std::int64_t c = 0; c < d; ++c) {
        both[c / turn * 2 * turn + c % turn] = static_cast<float>(cosines[t * d + c]);
        both[c / turn * 2 * turn + turn + c % turn] = static_cast<float>(sines[t * d + c]);
      }
      for (std::int64_t row = t * heads; row < (t + 1) * heads; ++row) {
        std::memcpy(own, x + row * d, d * sizeof(float));
        for (std::int64_t c = 0; c < d; ++c) partner[c] = own[partners[c]];
        passes.call[0](elements(own), elements(partner), elements(both), nullptr, result,
                       Sizes{padded / turn, 0, nullptr, nullptr, nullptr});
        std::memcpy(out + row * d, result, d * sizeof(float));
      }
    }
  });
  return failed ? NO_MEMORY : status;
}

// **Attention** of the last of some tokens over all of them. Keys and values of a head are rows of d channels, and
// heads lie `key_stride` and `value_stride` elements apart.
struct Heads {
  std::int64_t tokens, heads, kv_heads, length, d, window;  // a window of 0 is none
  std::int64_t key_stride, value_stride;

  std::int64_t channels() const { return (d + 15) / 16 * 16; }
};

// `turn` tokens, of which `left` are to be seen, as the kernels read them: in place, or copied where less than that are
// left or nothing lies behind the last channel. Zeros follow the copy, as many as a kernel may read.
inline const float* rows_at(const Passes& passes, const Heads& shape, const float* rows, std::int64_t first,
                            std::int64_t left, float* copy) {
  if (left >= turn && (shape.channels() == shape.d || first + turn < shape.length)) return rows + first * shape.d;
  const std::int64_t seen = std::min(left, turn), read = (seen + passes.lanes - 1) / passes.lanes * passes.lanes;
  std::memcpy(copy, rows + first * shape.d, seen * shape.d * sizeof(float));
  std::fill(copy + seen * shape.d, copy + read * shape.d + shape.channels() - shape.d, 0.0f);
  return copy;
}

inline std::int64_t attention_room(const Heads& shape, std::int64_t heads) {
  return turn * shape.d + 16 + heads * (2 * shape.channels() + 16 + (shape.length + turn - 1) / turn * turn);
}

// Query heads h0 .. h1 of one token, which all read key-value head j. `room` is for `attention_room` floats.
inline void attend_heads(const Passes& passes, const Heads& shape, const float* queries, const float* keys,
                         const float* values, std::int64_t token, std::int64_t j, std::int64_t h0, std::int64_t h1,
                         float* room, float* out) {
  const std::int64_t d = shape.d, channels = shape.channels(), end = shape.length - shape.tokens + token + 1;
  const std::int64_t start = shape.window > 0 ? std::max<std::int64_t>(0, end - shape.window) : 0, seen = end - start;
  const std::int64_t padded = (seen + turn - 1) / turn * turn;
  float* const copy = room + (h1 - h0) * (2 * channels + 16 + padded);
  const auto query = [&](std::int64_t h) { return room + (h - h0) * (channels + 16); };  // its scale behind it
  const auto mix = [&](std::int64_t h) { return query(h1) + (h - h0) * channels; };
  const auto shares = [&](std::int64_t h) { return mix(h1) + (h - h0) * padded; };
  const auto sizes = [](std::int64_t turns) { return Sizes{turns, 0, nullptr, nullptr, nullptr}; };
  std::fill(room, shares(h0), 0.0f);
  for (std::int64_t h = h0; h < h1; ++h) {
    std::memcpy(query(h), queries + (token * shape.heads + h) * d, d * sizeof(float));
    query(h)[channels] = static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
  }
  for (std::int64_t u = 0; u < seen; u += turn) {
    const float* const rows = rows_at(passes, shape, keys + j * shape.key_stride, start + u, seen - u, copy);
    const std::int64_t turns = (std::min(seen - u, turn) + passes.lanes - 1) / passes.lanes;
    for (std::int64_t h = h0; h < h1; ++h)
      passes.call[0](elements(rows), nullptr, nullptr, query(h), shares(h) + u, sizes(turns));
  }
  for (std::int64_t h = h0; h < h1; ++h) {
    std::fill(shares(h) + seen, shares(h) + padded, -std::numeric_limits<float>::infinity());
    const float minus = -largest(passes.call[1], shares(h), padded);
    each(passes.call[2], &minus, shares(h), nullptr, padded, shares(h));
  }
  for (std::int64_t u = 0; u < seen; u += turn) {
    const float* const rows = rows_at(passes, shape, values + j * shape.value_stride, start + u, seen - u, copy);
    for (std::int64_t h = h0; h < h1; ++h)
      for (std::int64_t c = 0; c < channels; c += passes.channels)
        passes.call[4](elements(rows + c), nullptr, nullptr, shares(h) + u, mix(h) + c,
                       sizes((std::min(seen - u, turn) + 1) / 2));
  }
  for (std::int64_t h = h0; h < h1; ++h) {
    const float factor = 1 / sum(passes.call[3], shares(h), padded);
    each(passes.call[5], &factor, mix(h), nullptr, d, out + (token * shape.heads + h) * d);
  }
}

// scores, largest, exponentials, sums, mixed, scaled. The query heads of a key-value head go together, so that what
// they read comes from memory once; where that leaves threads without work, they go one by one.
inline Status attend(const Passes& passes, const Heads& shape, const float* queries, const float* keys,
                     const float* values, float* out) {
  const std::int64_t group = shape.heads / shape.kv_heads, jobs = shape.tokens * shape.kv_heads;
  const std::int64_t parts = jobs < 2 * passes.pool->threads() ? group : 1, heads = group / parts;
  const std::int64_t work = heads * shape.length * (2 * shape.d + exponential_work);
  std::atomic<bool> failed{false};
  const Status status = spread(*passes.pool, jobs * parts, work, [&](std::int64_t first, std::int64_t last) {
    const Scratch room = scratch(attention_room(shape, heads) * sizeof(float));
    if (!room) return failed.store(true);
    for (std::int64_t job = first; job < last; ++job) {
      const std::int64_t token = job / (shape.kv_heads * parts), h = job % (shape.kv_heads * parts) * heads;
      attend_heads(passes, shape, queries, keys, values, token, h / group, h, h + heads,
                   static_cast<float*>(room.get()), out);
    }
  });
  return failed ? NO_MEMORY : status;
}

namespace bridge {

// What Python calls. Like those of bridge.h, each does nothing where there is nothing to do, whatever the addresses.

inline std::uintptr_t create_passes(std::uintptr_t pool, const std::uint64_t* kernels, int count, std::int64_t lanes,
                                    std::int64_t channels) {
  Passes* const passes = new Passes{reinterpret_cast<Pool*>(pool), lanes, channels, {}};
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

inline int rotate(std::uintptr_t passes, const float* x, const double* cosines, const double* sines,
                  const std::int64_t* partners, std::int64_t tokens, std::int64_t heads, std::int64_t d, float* out) {
  if (tokens == 0) return OK;
  return lowbit::rotate(*at<Passes>(passes), x, cosines, sines, partners, tokens, heads, d, out);
}

inline int attend(std::uintptr_t passes, const float* queries, const float* keys, const float* values,
                  std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t length, std::int64_t d,
                  std::int64_t window, std::int64_t key_stride, std::int64_t value_stride, float* out) {
  if (tokens == 0) return OK;
  const Heads shape{tokens, heads, kv_heads, length, d, window, key_stride, value_stride};
  return lowbit::attend(*at<Passes>(passes), shape, queries, keys, values, out);
}

}  // namespace bridge
}  // namespace lowbit
