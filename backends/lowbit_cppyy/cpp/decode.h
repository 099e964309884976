// The operations between two linear layers of a decode step, composed of kernels that pass over rows (elementwise.py).
//
// A kernel processes `chunk` elements in each iteration; the rest of a row goes through a buffer. Rows, tokens and
// heads are split between threads; no result depends on the split.
#pragma once

#include <cfloat>
#include <cmath>
#include <limits>

#include "bridge.h"

namespace lowbit {

constexpr std::int64_t chunk = 64;
constexpr std::int64_t together = 3;  // queries that share rows (lowbit_cppyy.codegen.attention.TOGETHER)
constexpr std::int64_t exponential_work = 16;  // the cost of an exponential, in multiply-adds

// The kernels of one operation, in the order of the comment above it, and its threads.
struct KernelSet {
  Pool* pool;
  std::int64_t lanes;     // of their registers
  std::int64_t channels;  // of a head that one call of `mixed` computes
  MicroKernel call[14];
};

inline const std::uint32_t* elements(const float* a) { return reinterpret_cast<const std::uint32_t*>(a); }

inline void pass(MicroKernel kernel, std::int64_t iterations, const float* w, const float* s, const float* x,
                 float* y) {
  kernel(elements(w), elements(s), nullptr, x, y, Sizes{iterations});
}

// Elementwise: y = f(w, s), with scalars at x. `s` may be nullptr, and y may be w.
inline void each(MicroKernel kernel, const float* x, const float* w, const float* s, std::int64_t n, float* y) {
  const std::int64_t whole = n / chunk * chunk, rest = n - whole;
  if (whole > 0) pass(kernel, whole / chunk, w, s, x, y);
  if (rest == 0) return;
  alignas(64) float first[chunk] = {}, second[chunk] = {}, result[chunk];
  std::memcpy(first, w + whole, rest * sizeof(float));
  if (s) std::memcpy(second, s + whole, rest * sizeof(float));
  pass(kernel, 1, first, second, x, result);
  std::memcpy(y + whole, result, rest * sizeof(float));
}

// A reduction: the kernel folds all elements into `chunk` numbers, which start as `none`; these are then halved.
template <class Fold>
inline float folded(MicroKernel kernel, const float* w, std::int64_t n, float none, Fold two) {
  alignas(64) float many[chunk], last[chunk];
  std::fill_n(many, chunk, none);
  const std::int64_t whole = n / chunk * chunk, rest = n - whole;
  if (whole > 0) pass(kernel, whole / chunk, w, nullptr, nullptr, many);
  if (rest > 0) {
    std::fill_n(last, chunk, none);
    std::memcpy(last, w + whole, rest * sizeof(float));
    pass(kernel, 1, last, nullptr, nullptr, many);
  }
  for (std::int64_t half = chunk / 2; half > 0; half /= 2)
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

// Calls body(first, last) for parts of a range, in several threads if that pays off. `work` is the cost of one item, in
// multiply-adds.
template <class Body> Status spread(Pool& pool, std::int64_t count, std::int64_t work, const Body& body) {
  const auto call = [](const void* context, std::int64_t first, std::int64_t last) {
    (*static_cast<const Body*>(context))(first, last);
  };
  const std::int64_t fair = count / (pool.threads() * chunks_per_thread), worth = chunk_work / work + 1;
  return pool.run(count, std::max(fair, worth), count * work >= wake_work, call, &body);
}

// The same with memory for each part: body(first, last, room), where the room has this many bytes.
template <class Body>
Status spread_with(Pool& pool, std::int64_t count, std::int64_t work, std::int64_t bytes, const Body& body) {
  std::atomic<bool> failed{false};
  const Status status = spread(pool, count, work, [&](std::int64_t first, std::int64_t last) {
    const Scratch room = scratch(bytes);
    if (!room) return failed.store(true);
    body(first, last, room.get());
  });
  return failed ? NO_MEMORY : status;
}

// RMSNorm of a row whose sum of squares overflows float32 or is NaN: in float64, where squares of float32 and their
// sums cannot overflow. The result does not depend on the instruction set, because squares are exact.
inline void rms_norm_wide(const float* x, const float* gain, float epsilon, std::int64_t n, float* out) {
  double squares = 0;
  for (std::int64_t i = 0; i < n; ++i) squares += static_cast<double>(x[i]) * x[i];
  const double factor = 1 / std::sqrt(squares / static_cast<double>(n) + epsilon);
  for (std::int64_t i = 0; i < n; ++i) out[i] = static_cast<float>(x[i] * factor * gain[i]);
}

// squares, normed
inline void rms_norm_row(const KernelSet& kernels, const float* row, const float* gain, float epsilon, std::int64_t n,
                         float* out) {
  const float mean = sum(kernels.call[0], row, n) / static_cast<float>(n) + epsilon;
  const float factor = 1 / std::sqrt(mean);
  if (mean <= FLT_MAX) each(kernels.call[1], &factor, row, gain, n, out);
  else rms_norm_wide(row, gain, epsilon, n, out);
}

inline Status rms_norm(const KernelSet& kernels, const float* x, const float* gain, float epsilon, std::int64_t rows,
                       std::int64_t n, float* out) {
  return spread(*kernels.pool, rows, 2 * n, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) rms_norm_row(kernels, x + t * n, gain, epsilon, n, out + t * n);
  });
}

// A pass with exponentials, such as gated: y = f(w, s), with scalars at x. `s` may be nullptr.
inline Status exponentials(const KernelSet& kernels, const float* x, const float* w, const float* s, std::int64_t count,
                           float* y) {
  const std::int64_t iterations = (count + chunk - 1) / chunk;
  return spread(*kernels.pool, iterations, chunk * exponential_work, [&](std::int64_t first, std::int64_t last) {
    const std::int64_t start = first * chunk, stop = std::min(last * chunk, count);
    each(kernels.call[0], x, w + start, s ? s + start : nullptr, stop - start, y + start);
  });
}

// capped: 2 / c and c, at which its pass reads a cap.
struct Cap {
  float numbers[2];

  explicit Cap(float cap) : numbers{2 / cap, cap} {}
};

// largest, exponentials, sums, scaled
inline Status softmax(const KernelSet& kernels, const float* scores, std::int64_t rows, std::int64_t n, float* out) {
  return spread(*kernels.pool, rows, n * exponential_work, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t t = first; t < last; ++t) {
      float* const row = out + t * n;
      const float minus = -largest(kernels.call[0], scores + t * n, n);
      each(kernels.call[1], &minus, scores + t * n, nullptr, n, row);
      const float factor = 1 / sum(kernels.call[2], row, n);
      each(kernels.call[3], &factor, row, nullptr, n, row);
    }
  });
}

// rotated
inline std::int64_t padded_channels(std::int64_t d) { return (d + chunk - 1) / chunk * chunk; }

// The cosines and sines of a position, d channels of each, in alternate chunks, as a rotation reads them. The padding
// of the last chunks is not written.
template <class Number> inline void lay_angles(const Number* cosines, const Number* sines, std::int64_t d, float* both) {
  for (std::int64_t c = 0; c < d; ++c) {
    both[c / chunk * 2 * chunk + c % chunk] = static_cast<float>(cosines[c]);
    both[c / chunk * 2 * chunk + chunk + c % chunk] = static_cast<float>(sines[c]);
  }
}

// One head; `out` may be x. `room` has 3 * padded_channels(d) floats, with zeros as padding.
inline void rotate_head(const KernelSet& kernels, const float* x, const float* both, const std::int64_t* partners,
                        std::int64_t d, float* room, float* out) {
  const std::int64_t padded = padded_channels(d);
  float *const own = room, *const partner = own + padded, *const result = partner + padded;
  std::memcpy(own, x, d * sizeof(float));
  for (std::int64_t c = 0; c < d; ++c) partner[c] = own[partners[c]];
  kernels.call[0](elements(own), elements(partner), elements(both), nullptr, result, Sizes{padded / chunk});
  std::memcpy(out, result, d * sizeof(float));
}

inline Status rotate(const KernelSet& kernels, const float* x, const double* cosines, const double* sines,
                     const std::int64_t* partners, std::int64_t tokens, std::int64_t heads, std::int64_t d,
                     float* out) {
  if (std::any_of(partners, partners + d, [&](std::int64_t c) { return c < 0 || c >= d; })) return STRANGE;
  const std::int64_t padded = padded_channels(d), bytes = 5 * padded * sizeof(float);
  return spread_with(*kernels.pool, tokens, 4 * heads * d, bytes, [&](std::int64_t first, std::int64_t last, void* room) {
    float* const both = static_cast<float*>(room);
    std::fill_n(both, 5 * padded, 0.0f);
    for (std::int64_t t = first; t < last; ++t) {
      lay_angles(cosines + t * d, sines + t * d, d, both);
      for (std::int64_t row = t * heads; row < (t + 1) * heads; ++row)
        rotate_head(kernels, x + row * d, both, partners, d, both + 2 * padded, out + row * d);
    }
  });
}

// **Attention** of the last of some tokens over all of them. Keys and values of a head are rows of d channels; heads
// are `key_stride` and `value_stride` elements apart. Scores may be shaped (lowbit.attention.shaped).
struct Heads {
  std::int64_t tokens, heads, kv_heads, length, d, window;  // a window of 0 means no window
  std::int64_t key_stride, value_stride;
  float scale = 0, cap = 0;      // a scale of 0 means 1 / sqrt(d), a cap of 0 no cap
  const float* sinks = nullptr;  // of each query head; nullptr for none

  std::int64_t channels() const { return (d + 15) / 16 * 16; }
};

// Zeros after the rows of `seen` tokens of a copy: as many as a kernel may read.
inline void fill_behind(const KernelSet& kernels, const Heads& shape, std::int64_t seen, float* copy) {
  const std::int64_t read = (seen + kernels.lanes - 1) / kernels.lanes * kernels.lanes;
  std::fill(copy + seen * shape.d, copy + read * shape.d + shape.channels() - shape.d, 0.0f);
}

// The rows of `chunk` tokens, of which `left` are visible, for a kernel: in place, or copied if the first of several
// queries sees fewer, `least`, or a kernel would read past the last row of the head. A kernel reads `channels` elements
// from the start of each row, which for narrow heads are several rows.
inline const float* rows_at(const KernelSet& kernels, const Heads& shape, const float* rows, std::int64_t first,
                            std::int64_t left, std::int64_t least, float* copy) {
  const std::int64_t end = (first + chunk - 1) * shape.d + shape.channels();
  if (least >= chunk && end <= shape.length * shape.d) return rows + first * shape.d;
  const std::int64_t seen = std::min(left, chunk);
  std::memcpy(copy, rows + first * shape.d, seen * shape.d * sizeof(float));
  fill_behind(kernels, shape, seen, copy);
  return copy;
}

inline std::int64_t attention_room(const Heads& shape, std::int64_t queries) {
  return chunk * (shape.d + together) + 16 + queries * (2 * shape.channels() + 16 + (shape.length + chunk - 1) / chunk * chunk);
}

// Query heads h0 .. h1 of the tokens t0 .. t1, which all read one key-value head. If there are several tokens, they have
// no window or one that begins at the first token. `keys(first, left, least, copy)` and `values` give its rows as
// `rows_at` does. `room` has space for `attention_room` floats, with a query for each head and token.
template <class Keys, class Values>
inline void attend_heads(const KernelSet& kernels, const Heads& shape, const float* queries, const Keys& keys,
                         const Values& values, std::int64_t t0, std::int64_t t1, std::int64_t h0, std::int64_t h1,
                         float* room, float* out) {
  const std::int64_t d = shape.d, channels = shape.channels(), first_end = shape.length - shape.tokens + t0 + 1;
  const std::int64_t start = shape.window > 0 ? std::max<std::int64_t>(0, first_end - shape.window) : 0;
  const std::int64_t heads = h1 - h0, count = (t1 - t0) * heads, least = first_end - start, most = least + t1 - t0 - 1;
  const std::int64_t padded = (most + chunk - 1) / chunk * chunk;
  const auto seen = [&](std::int64_t n) { return least + n / heads; };
  float* const copy = room + count * (2 * channels + 16 + padded);
  float* const rows_together = copy + chunk * d + 16;
  // Followed by the scale, and by the exponential of the sink.
  const auto query = [&](std::int64_t n) { return room + n * (channels + 16); };
  const auto mix = [&](std::int64_t n) { return query(count) + n * channels; };
  const auto probabilities = [&](std::int64_t n) { return mix(count) + n * padded; };
  const auto row_of = [&](std::int64_t n) { return ((t0 + n / heads) * shape.heads + h0 + n % heads) * d; };
  std::fill(room, probabilities(0), 0.0f);
  for (std::int64_t n = 0; n < count; ++n) {
    std::memcpy(query(n), queries + row_of(n), d * sizeof(float));
    query(n)[channels] = shape.scale > 0 ? shape.scale : static_cast<float>(1 / std::sqrt(static_cast<double>(d)));
  }
  // Calls body(rows, u, n, queries, fetches) for all rows that `queries` queries from n on see, `chunk` at a time, the
  // last token first. A row is 0 for the token before it, as rows after the last are for all tokens: a kernel may read
  // the row after the visible ones.
  const auto each_chunk = [&](const auto& rows_from, const auto& body) {
    for (std::int64_t u = 0; u < most; u += chunk) {
      const float* const rows = rows_from(start + u, most - u, least - u, copy);
      for (std::int64_t n = count; n > 0 && u < seen(n - 1);) {
        const std::int64_t behind = seen(n - 1) - u, head = (n - 1) % heads;
        if (head == heads - 1 && behind < most - u && behind < chunk) std::fill_n(copy + behind * d, d, 0.0f);
        const std::int64_t queries = kernels.call[10] && head >= together - 1 ? together : 1;
        const bool fetches = n == count && rows != copy;  // the others find the rows in a cache
        n -= queries;
        body(rows, u, n, queries, fetches);
      }
    }
  };
  each_chunk(keys, [&](const float* rows, std::int64_t u, std::int64_t n, std::int64_t queries, bool fetches) {
    const Sizes sizes{(std::min(seen(n) - u, chunk) + kernels.lanes - 1) / kernels.lanes};
    const MicroKernel kernel = kernels.call[queries == 1 ? (fetches ? 8 : 0) : fetches ? 12 : 10];
    if (queries == 1) return kernel(elements(rows), nullptr, nullptr, query(n), probabilities(n) + u, sizes);
    kernel(elements(rows), nullptr, nullptr, query(n), rows_together, sizes);
    for (std::int64_t q = 0; q < queries; ++q)
      std::memcpy(probabilities(n + q) + u, rows_together + q * chunk, sizes.groups * kernels.lanes * sizeof(float));
  });
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t whole = (seen(n) + chunk - 1) / chunk * chunk;
    if (shape.cap > 0)
      each(kernels.call[7], Cap(shape.cap).numbers, probabilities(n), nullptr, seen(n), probabilities(n));
    constexpr float none = -std::numeric_limits<float>::infinity();
    std::fill(probabilities(n) + seen(n), probabilities(n) + whole, none);
    const float sink = shape.sinks ? shape.sinks[h0 + n % heads] : none;
    const float minus = -std::max(largest(kernels.call[1], probabilities(n), whole), sink);
    each(kernels.call[2], &minus, probabilities(n), nullptr, whole, probabilities(n));
    if (shape.sinks) each(kernels.call[2], &minus, &sink, nullptr, 1, query(n) + channels + 1);
  }
  each_chunk(values, [&](const float* rows, std::int64_t u, std::int64_t n, std::int64_t queries, bool fetches) {
    const Sizes sizes{(std::min(seen(n) - u, chunk) + 1) / 2};
    for (std::int64_t q = 0; queries > 1 && q < queries; ++q)
      std::memcpy(rows_together + q * chunk, probabilities(n + q) + u, chunk * sizeof(float));
    const MicroKernel kernel = kernels.call[queries == 1 ? (fetches ? 9 : 4) : fetches ? 13 : 11];
    const float* const shares = queries == 1 ? probabilities(n) + u : rows_together;
    for (std::int64_t c = 0; c < channels; c += kernels.channels)
      kernel(elements(rows + c), nullptr, nullptr, shares, mix(n) + c, sizes);
  });
  for (std::int64_t n = 0; n < count; ++n) {
    const std::int64_t whole = (seen(n) + chunk - 1) / chunk * chunk;
    const float factor = 1 / (sum(kernels.call[3], probabilities(n), whole) + query(n)[channels + 1]);
    each(kernels.call[5], &factor, mix(n), nullptr, d, out + row_of(n));
  }
}

// The smallest number of equal parts of a group of query heads that fit; the number of heads if none fit.
template <class Fits> std::int64_t parts_of(std::int64_t group, const Fits& fits) {
  for (std::int64_t parts = 1; parts < group; ++parts)
    if (group % parts == 0 && fits(parts)) return parts;
  return group;
}

// scores, largest, exponentials, sums, mixed, scaled; widened for float16 caches, and capped for soft caps; scores and
// mixed that fetch rows ahead, for the first query that reads them; and of `together` queries both without and with
// fetches, or nothing. The query heads of a key-value head are computed together, so that its rows are read from memory
// once; they are divided if threads would otherwise have no work.
inline Status attend(const KernelSet& kernels, const Heads& shape, const float* queries, const float* keys,
                     const float* values, float* out) {
  const std::int64_t group = shape.heads / shape.kv_heads, jobs = shape.tokens * shape.kv_heads;
  const std::int64_t parts = parts_of(group, [&](std::int64_t n) { return jobs * n >= 2 * kernels.pool->threads(); });
  const std::int64_t heads = group / parts;
  const std::int64_t work = heads * shape.length * (2 * shape.d + exponential_work);
  const std::int64_t bytes = attention_room(shape, heads) * sizeof(float);
  return spread_with(*kernels.pool, jobs * parts, work, bytes, [&](std::int64_t first, std::int64_t last, void* room) {
    for (std::int64_t job = first; job < last; ++job) {
      const std::int64_t token = job / (shape.kv_heads * parts), h = job % (shape.kv_heads * parts) * heads;
      const auto rows_of = [&](const float* rows) {
        return [&kernels, &shape, rows](std::int64_t start, std::int64_t left, std::int64_t least, float* copy) {
          return rows_at(kernels, shape, rows, start, left, least, copy);
        };
      };
      attend_heads(kernels, shape, queries, rows_of(keys + h / group * shape.key_stride),
                   rows_of(values + h / group * shape.value_stride), token, token + 1, h, h + heads,
                   static_cast<float*>(room), out);
    }
  });
}

namespace bridge {

// The functions that Python calls. Like those of bridge.h, each does nothing for a size of 0, whatever the addresses.

inline std::uintptr_t create_kernel_set(std::uintptr_t pool, const std::uint64_t* addresses, int count,
                                        std::int64_t lanes, std::int64_t channels) {
  KernelSet* const kernels = new KernelSet{reinterpret_cast<Pool*>(pool), lanes, channels, {}};
  for (int n = 0; n < count; ++n) kernels->call[n] = reinterpret_cast<MicroKernel>(addresses[n]);
  return reinterpret_cast<std::uintptr_t>(kernels);
}

inline void destroy_kernel_set(std::uintptr_t kernels) { delete at<KernelSet>(kernels); }

inline int rms_norm(std::uintptr_t kernels, const float* x, const float* gain, float epsilon, std::int64_t rows,
                    std::int64_t n, float* out) {
  return rows == 0 ? OK : lowbit::rms_norm(*at<KernelSet>(kernels), x, gain, epsilon, rows, n, out);
}

inline int gated_unit(std::uintptr_t kernels, const float* gate, const float* up, std::int64_t count, float* out) {
  return count == 0 ? OK : exponentials(*at<KernelSet>(kernels), nullptr, gate, up, count, out);
}

inline int clamped_unit(std::uintptr_t kernels, const float* gate, const float* up, float limit, std::int64_t count,
                        float* out) {
  const float minus = -limit;
  return count == 0 ? OK : exponentials(*at<KernelSet>(kernels), &minus, gate, up, count, out);
}

inline int soft_cap(std::uintptr_t kernels, const float* x, float cap, std::int64_t count, float* out) {
  return count == 0 ? OK : exponentials(*at<KernelSet>(kernels), Cap(cap).numbers, x, nullptr, count, out);
}

inline int softmax(std::uintptr_t kernels, const float* scores, std::int64_t rows, std::int64_t n, float* out) {
  return rows == 0 ? OK : lowbit::softmax(*at<KernelSet>(kernels), scores, rows, n, out);
}

inline int rotate(std::uintptr_t kernels, const float* x, const double* cosines, const double* sines,
                  const std::int64_t* partners, std::int64_t tokens, std::int64_t heads, std::int64_t d, float* out) {
  if (tokens == 0) return OK;
  return lowbit::rotate(*at<KernelSet>(kernels), x, cosines, sines, partners, tokens, heads, d, out);
}

inline int attend(std::uintptr_t kernels, const float* queries, const float* keys, const float* values,
                  std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t length, std::int64_t d,
                  std::int64_t window, std::int64_t key_stride, std::int64_t value_stride, float* out) {
  if (tokens == 0) return OK;
  const Heads shape{tokens, heads, kv_heads, length, d, window, key_stride, value_stride};
  return lowbit::attend(*at<KernelSet>(kernels), shape, queries, keys, values, out);
}

inline int attend_shaped(std::uintptr_t kernels, const float* queries, const float* keys, const float* values,
                         std::int64_t tokens, std::int64_t heads, std::int64_t kv_heads, std::int64_t length,
                         std::int64_t d, std::int64_t window, std::int64_t key_stride, std::int64_t value_stride,
                         float scale, float cap, const float* sinks, bool sunk, float* out) {
  if (tokens == 0) return OK;
  const Heads shape{tokens,     heads,        kv_heads, length, d, window, key_stride, value_stride, scale,
                    cap,        sunk ? sinks : nullptr};
  return lowbit::attend(*at<KernelSet>(kernels), shape, queries, keys, values, out);
}

}  // namespace bridge
}  // namespace lowbit
