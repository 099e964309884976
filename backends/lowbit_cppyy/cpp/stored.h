// Products with stored matrices: activations laid out for the kernels of stored/kernel.py, and one call of a matrix.
#pragma once

#include <vector>

#include "bridge.h"

namespace lowbit {

enum Type { FLOAT32 = 0, FLOAT16 = 1, BFLOAT16 = 2 };

// A kernel, and how activations are laid out for it and for one matrix (stored/activations.py).
struct StoredRoute {
  Route route;  // its call, rows, columns, x_length, least, beyond, sizes and x_starts
  std::int64_t run, center;
  bool headed, integer, centered, ordered, run_sums, group_sums;
  float sign, lowered;  // `lowered`: the power of two that sums of products are times too large
  const float *factors, *head;
  const std::int64_t *lengths, *order;
  std::vector<Sizes> sizes;
};

// **Types of 16 bits.** Widening is exact; narrowing rounds to nearest, ties to even.

inline float widen_half(std::uint32_t h) {
  const std::uint32_t sign = (h & 0x8000u) << 16, e = h & 0x7FFFu;
  if (e >= 0x7C00u) return from_bits(sign | ((e << 13) + (224u << 23)));
  if (e >= 0x400u) return from_bits(sign | ((e << 13) + (112u << 23)));
  return from_bits(sign | to_bits(static_cast<float>(e) * 0x1p-24f));
}

inline std::uint16_t narrow_half(float x) {
  const std::uint32_t a = to_bits(x), sign = a >> 16 & 0x8000u, e = a & 0x7FFFFFFFu;
  if (e > 0x7F800000u) return static_cast<std::uint16_t>(sign | 0x7E00u);
  if (e >= 0x47800000u) return static_cast<std::uint16_t>(sign | 0x7C00u);  // 2^16 or more; what rounds to it follows
  // Below 2^-14: the steps of float32 between a half and one are those of subnormal float16.
  if (e < 0x38800000u) return static_cast<std::uint16_t>(sign | (to_bits(from_bits(e) + 0.5f) - to_bits(0.5f)));
  return static_cast<std::uint16_t>(sign | ((e + 0xFFFu + (e >> 13 & 1u) - (112u << 23)) >> 13));
}

inline std::uint16_t narrow_brain(float x) {
  const std::uint32_t a = to_bits(x);
  if ((a & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<std::uint16_t>(a >> 16 | 0x40u);
  return static_cast<std::uint16_t>((a + 0x7FFFu + (a >> 16 & 1u)) >> 16);
}

inline void widen(const void* x, std::int64_t type, std::int64_t n, float* to) {
  const std::uint16_t* const shorts = static_cast<const std::uint16_t*>(x);
  if (type == FLOAT32) std::memcpy(to, x, n * sizeof(float));
  else if (type == FLOAT16) for (std::int64_t i = 0; i < n; ++i) to[i] = widen_half(shorts[i]);
  else for (std::int64_t i = 0; i < n; ++i) to[i] = from_bits(static_cast<std::uint32_t>(shorts[i]) << 16);
}

inline void narrow(const float* x, std::int64_t type, std::int64_t n, void* to) {
  std::uint16_t* const shorts = static_cast<std::uint16_t*>(to);
  if (type == FLOAT16) for (std::int64_t i = 0; i < n; ++i) shorts[i] = narrow_half(x[i]);
  else for (std::int64_t i = 0; i < n; ++i) shorts[i] = narrow_brain(x[i]);
}

// **Laying out.** A row is written element by element, `rows` elements apart.

constexpr std::int64_t stored_unit = 32, head_elements = 32;  // rows of a unit; elements of a table before a block

// One run of float32: minus the center times its sum, the activations, the sum. `from` is null for a missing row, which
// is zeros.
inline void lay_run(const StoredRoute& own, const float* from, std::int64_t length, std::int64_t padded, bool sum_after,
                    float* to) {
  const std::int64_t step = own.route.rows;
  const float sum = from && (own.centered || sum_after) ? group_sum(from, length) : 0.0f;
  if (own.centered) *to = -static_cast<float>(own.center) * sum * own.lowered, to += step;
  std::int64_t k = 0;
  if (from) for (; k < length; ++k, to += step) *to = from[k] * own.factors[k % stored_unit];
  for (; k < padded; ++k, to += step) *to = 0.0f;
  if (sum_after) *to = own.sign * sum;
}

inline std::int64_t padded_rows(std::int64_t length) { return (length + stored_unit - 1) / stored_unit * stored_unit; }

// `count` rows of K float32 numbers, one after the other.
inline void lay_stored(const Linear& linear, const StoredRoute& own, const float* x, std::int64_t count, float* to) {
  const Route& route = own.route;
  const std::int64_t step = route.rows;
  float* const begin = to;
  std::int64_t first = 0, group = 0;
  for (std::int64_t b = 0; b < linear.blocks; ++b) {
    to = begin + route.x_starts[b] * step;
    if (own.headed) std::memcpy(to, own.head, head_elements * sizeof(float)), to += head_elements;
    for (std::int64_t last = group + own.sizes[b].groups; group < last; ++group) {
      const std::int64_t length = own.lengths[group], run = own.run ? own.run : padded_rows(length);
      for (std::int64_t start = 0; start < padded_rows(length); start += run) {
        const bool ends = own.run_sums || (own.group_sums && !own.run);
        for (std::int64_t r = 0; r < step; ++r)
          lay_run(own, r < count ? x + r * linear.shape.rows + first + start : nullptr, std::min(run, length - start), run,
                  ends, to + r);
        to += (own.centered + run + ends) * step;
      }
      first += length;
    }
  }
}

// `count` rows of K signed bytes, with a scale for every `each` of them; ordered rows have one scale each.
inline void lay_stored_bytes(const Linear& linear, const StoredRoute& own, const std::int8_t* x, const float* scales,
                             std::int64_t each, std::int64_t count, float* to) {
  const Route& route = own.route;
  const std::int64_t step = route.rows, K = linear.shape.rows, parts = (K + each - 1) / each, run = own.run;
  float* const begin = to;
  std::int64_t first = 0, group = 0;
  for (std::int64_t b = 0; b < linear.blocks; ++b) {
    to = begin + route.x_starts[b] * step;
    if (own.headed) std::memcpy(to, own.head, head_elements * sizeof(float)), to += head_elements;
    for (std::int64_t last = group + own.sizes[b].groups; group < last; ++group) {
      const std::int64_t length = own.lengths[group];
      float totals[max_rows] = {};
      for (std::int64_t start = 0; start < padded_rows(length); start += run) {
        const std::int64_t here = std::max<std::int64_t>(0, std::min(run, length - start));
        const std::int64_t size = own.centered + run / 4 + 1 + own.run_sums;
        for (std::int64_t r = 0; r < step; ++r) {
          const bool exists = r < count && here > 0;
          const std::int64_t at = first + start;
          std::int8_t bytes[stored_unit] = {};
          std::int32_t sum = 0;
          if (exists && !own.ordered) std::memcpy(bytes, x + r * K + at, here);
          else if (exists) for (std::int64_t k = 0; k < here; ++k) bytes[k] = x[r * K + own.order[at + k]];
          for (std::int64_t k = 0; k < here; ++k) sum += bytes[k];
          const float scale = exists ? scales[r * parts + at / each] : 0.0f;
          float* place = to + r;
          const std::int32_t start_value = static_cast<std::int32_t>(-own.center) * sum;
          if (own.centered) std::memcpy(place, &start_value, 4), place += step;
          for (std::int64_t k = 0; k < run; k += 4, place += step) std::memcpy(place, bytes + k, 4);
          *place = scale, place += step;
          const float part = own.sign * scale * static_cast<float>(sum);
          if (own.run_sums) *place = part;
          totals[r] += part;
        }
        to += size * step;
      }
      if (own.group_sums) {
        for (std::int64_t r = 0; r < step; ++r) to[r] = totals[r];
        to += step;
      }
      first += length;
    }
  }
}

// The same rows as floats, in the order of the matrix: for a route of floats, if the rows of a run have several scales.
inline void widen_bytes(const StoredRoute& own, std::int64_t K, const std::int8_t* x, const float* scales,
                        std::int64_t each, std::int64_t count, float* to) {
  const std::int64_t parts = (K + each - 1) / each;
  for (std::int64_t r = 0; r < count; ++r)
    for (std::int64_t k = 0; k < K; ++k) {
      const std::int64_t from = own.ordered ? own.order[k] : k;
      to[r * K + k] = scales[r * parts + from / each] * static_cast<float>(x[r * K + from]);
    }
}

// **One call.** Results of 16 bits are computed in float32 first.

template <class Lay>
inline Status stored_in_batches(const Linear& linear, const StoredRoute& own, void* out, std::int64_t type,
                                std::int64_t T, const Lay& lay) {
  if (type == FLOAT32) return in_batches(linear, own.route, static_cast<float*>(out), T, lay);
  const Scratch room = scratch(T * linear.columns * sizeof(float));
  if (!room) return NO_MEMORY;
  float* const wide = static_cast<float*>(room.get());
  const Status status = in_batches(linear, own.route, wide, T, lay);
  if (status == OK) narrow(wide, type, T * linear.columns, out);
  return status;
}

// Y = X W for T rows of a type, with results of a type. INEXACT if the powers of two of the route would round an
// activation; then nothing is written.
inline Status multiply_stored(const Linear& linear, const StoredRoute& own, const void* x, std::int64_t x_type, void* out,
                              std::int64_t out_type, std::int64_t T) {
  const std::int64_t K = linear.shape.rows;
  const bool wide = x_type == FLOAT32 && !own.ordered;
  const Scratch room = scratch(wide ? 0 : (T + 1) * K * sizeof(float));
  if (!room) return NO_MEMORY;
  const float* rows = static_cast<const float*>(x);
  if (!wide) {
    float* const copy = static_cast<float*>(room.get());
    float* const row = copy + T * K;
    const std::size_t each = x_type == FLOAT32 ? 4 : 2;
    for (std::int64_t t = 0; t < T; ++t) {
      float* const to = copy + t * K;
      widen(static_cast<const char*>(x) + t * K * each, x_type, K, own.ordered ? row : to);
      if (own.ordered) for (std::int64_t k = 0; k < K; ++k) to[k] = row[own.order[k]];
    }
    rows = copy;
  }
  if (any_inexact(own.route, rows, T * K)) return INEXACT;
  return stored_in_batches(linear, own, out, out_type, T, [&](std::int64_t row, std::int64_t count, float* to) {
    lay_stored(linear, own, rows + row * K, count, to);
  });
}

// The same for T rows of signed bytes with a scale for every `each` of them.
inline Status multiply_stored_bytes(const Linear& linear, const StoredRoute& own, const std::int8_t* x,
                                    const float* scales, std::int64_t each, void* out, std::int64_t type,
                                    std::int64_t T) {
  const std::int64_t K = linear.shape.rows, parts = (K + each - 1) / each;
  if (!own.integer) {
    const Scratch room = scratch(T * K * sizeof(float));
    if (!room) return NO_MEMORY;
    float* const rows = static_cast<float*>(room.get());
    widen_bytes(own, K, x, scales, each, T, rows);
    return stored_in_batches(linear, own, out, type, T, [&](std::int64_t row, std::int64_t count, float* to) {
      lay_stored(linear, own, rows + row * K, count, to);
    });
  }
  return stored_in_batches(linear, own, out, type, T, [&](std::int64_t row, std::int64_t count, float* to) {
    lay_stored_bytes(linear, own, x + row * K, scales + row * parts, each, count, to);
  });
}

namespace bridge {

// `numbers`: rows, columns, x_length, run, center, headed, integer, centered, ordered, run_sums, group_sums, sign,
// lowered, least, beyond. `lists` are addresses: factors, head, x_starts, turns, lengths, order. `firsts`: the first
// group of each block, and their number.
inline std::uintptr_t create_stored_route(std::uintptr_t kernel, const std::int64_t* numbers, const std::uint64_t* lists,
                                          const std::int64_t* firsts, std::int64_t blocks) {
  const std::int64_t* const n = numbers;
  StoredRoute* const own = new StoredRoute{};
  const std::int32_t* const turns = at<std::int32_t>(lists[3]);
  for (std::int64_t b = 0; b < blocks; ++b)
    own->sizes.push_back({firsts[b + 1] - firsts[b], 0, turns + firsts[b]});
  own->route = Route{};
  own->route.call = reinterpret_cast<MicroKernel>(kernel);
  own->route.rows = n[0], own->route.columns = n[1], own->route.x_length = n[2];
  own->route.least = static_cast<std::uint32_t>(n[13]), own->route.beyond = static_cast<std::uint32_t>(n[14]);
  own->route.sizes = own->sizes.data(), own->route.x_starts = at<std::int64_t>(lists[2]);
  own->run = n[3], own->center = n[4], own->headed = n[5], own->integer = n[6], own->centered = n[7];
  own->ordered = n[8], own->run_sums = n[9], own->group_sums = n[10], own->sign = static_cast<float>(n[11]);
  own->lowered = power_of_two(-n[12]);
  own->factors = at<float>(lists[0]), own->head = at<float>(lists[1]);
  own->lengths = at<std::int64_t>(lists[4]), own->order = at<std::int64_t>(lists[5]);
  return reinterpret_cast<std::uintptr_t>(own);
}

inline void destroy_stored_route(std::uintptr_t route) { delete at<StoredRoute>(route); }

// `x` and `out` are passed as bytes, whatever their types.
inline int multiply_stored(std::uintptr_t linear, std::uintptr_t route, const std::uint8_t* x, std::int64_t x_type,
                           std::uint8_t* out, std::int64_t out_type, std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply_stored(*at<Linear>(linear), *at<StoredRoute>(route), x, x_type, out, out_type, rows);
}

inline int multiply_stored_bytes(std::uintptr_t linear, std::uintptr_t route, const std::uint8_t* x, const float* scales,
                                 std::int64_t each, std::uint8_t* out, std::int64_t type, std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply_stored_bytes(*at<Linear>(linear), *at<StoredRoute>(route),
                                       reinterpret_cast<const std::int8_t*>(x), scales, each, out, type, rows);
}

}  // namespace bridge
}  // namespace lowbit
