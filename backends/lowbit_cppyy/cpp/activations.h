// Activations as the kernels read them (microkernel.py and integers.py describe the streams).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>

namespace lowbit {

// The sizes that a kernel takes: the number of groups or segments, and the iterations of the inner loop for each.
struct Sizes {
  std::int64_t groups, segments = 0;
  const std::int32_t* turns = nullptr;
  const std::int32_t* back = nullptr;  // for a segment: 1 if the next one begins in its last unit
  const std::int32_t* ends = nullptr;  // for a segment: 1 if a group ends with it
};

// Adds the product of `rows` rows of x and a tile of columns of one block of a panel to y. `w`, `s` and `z` point into
// the stream of weights, at the tile's first column in a row of words, of scales and of zeros.
using MicroKernel = void (*)(const std::uint32_t* w, const std::uint32_t* s, const std::uint32_t* z, const float* x,
                             float* y, const Sizes& sizes);

enum Layout { VALUES = 0, SUMS = 1, MANTISSAS = 2 };

// A kernel, and how activations are laid out for it and for one matrix.
struct Route {
  MicroKernel call;
  std::int64_t rows;     // rows of x at once
  std::int64_t columns;  // columns at once, a divisor of the panel
  std::int64_t layout;   // one of Layout
  std::int64_t head;     // elements before each block: the table of codes, or 0
  std::int64_t x_length;        // elements of one laid-out row of x
  std::int64_t tables;          // SUMS: tables of a unit
  std::uint32_t least, beyond;  // bits of the magnitudes between which factors are exact; 0 if all factors are 1
  const float* factors;         // VALUES: a power of two for each code of a unit
  const std::int32_t* terms;    // SUMS: four codes of the unit for each table
  const float* weights;         // SUMS: the weight of each of these codes
  const Sizes* sizes;           // for each block
  const std::int64_t* x_starts;  // the start of each block in a laid-out row
  const std::int32_t* segments;  // MANTISSAS: first row, rows, and first code in its unit, of each segment
};

struct Groups {
  std::int64_t rows, group_size, groups, block_groups, unit_codes;
  bool negative;  // whether the sum of a group is negated, for zero-points

  std::int64_t held(std::int64_t g) const { return std::min(group_size, rows - g * group_size); }
  std::int64_t units(std::int64_t g) const { return (held(g) + unit_codes - 1) / unit_codes; }
};

inline float from_bits(std::uint32_t a) {
  float d;
  std::memcpy(&d, &a, sizeof d);
  return d;
}

inline std::uint32_t to_bits(float a) {
  std::uint32_t d;
  std::memcpy(&d, &a, sizeof d);
  return d;
}

// The bits of the largest magnitude. Magnitudes compare as their bits do, also as signed numbers, for which even the
// oldest vector instructions have a maximum.
inline std::uint32_t largest_bits(const float* x, std::int64_t n) {
  std::int32_t most = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::int32_t bits = static_cast<std::int32_t>(to_bits(x[i]) & 0x7FFFFFFFu);
    most = bits > most ? bits : most;
  }
  return static_cast<std::uint32_t>(most);
}

constexpr float rounder = 12582912.0f;  // 1.5 * 2^23: a float near it is an integer

// The sum of n floats: eight running sums side by side, then a tree. The order is the same on every processor.
inline float group_sum(const float* x, std::int64_t n) {
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) sum[lane] += x[i + lane];
  for (int lane = 0; i + lane < n; ++lane) sum[lane] += x[i + lane];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Whether the factors of a route would round some activation, or make it infinite. The bits of positive floats have the
// same order as the floats; 0 is exact.
inline bool any_inexact(const Route& route, const float* x, std::int64_t n) {
  const std::uint32_t least = route.least, span = route.beyond - least;
  if (span == 0) return false;
  std::uint32_t found = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const std::uint32_t magnitude = to_bits(x[i]) & 0x7FFFFFFFu;
    found |= static_cast<std::uint32_t>(magnitude != 0) & static_cast<std::uint32_t>(magnitude - least >= span);
  }
  return found != 0;
}

// Writes the head of a block; after it, `block` rows of x lie side by side.
inline void lay_head(const Route& route, float* to) {
  for (std::int64_t i = 0; i < route.head; ++i) to[i] = static_cast<float>(i);
}

// VALUES: for each group the activations times their powers of two, zeros up to a whole unit, then the group's sum.
// Missing rows are zeros.
inline void lay_values(const Groups& shape, const Route& route, const float* x, std::int64_t count, float* to) {
  const std::int64_t block = route.rows;
  float* const begin = to;
  for (std::int64_t g = 0; g < shape.groups; ++g) {
    if (g % shape.block_groups == 0) {
      to = begin + route.x_starts[g / shape.block_groups] * block;
      lay_head(route, to), to += route.head;
    }
    const std::int64_t start = g * shape.group_size, held = shape.held(g);
    const std::int64_t codes = shape.units(g) * shape.unit_codes;
    for (std::int64_t r = 0; r < block; ++r) {
      const std::int64_t length = r < count ? held : 0;
      const float* const from = length > 0 ? x + r * shape.rows + start : nullptr;
      std::int64_t k = 0;
      for (; k + shape.unit_codes <= length; k += shape.unit_codes)
        for (std::int64_t code = 0; code < shape.unit_codes; ++code)
          to[(k + code) * block + r] = from[k + code] * route.factors[code];
      for (; k < length; ++k) to[k * block + r] = from[k] * route.factors[k % shape.unit_codes];
      for (; k < codes; ++k) to[k * block + r] = 0.0f;
      const float sum = length > 0 ? group_sum(from, length) : 0.0f;
      to[codes * block + r] = shape.negative ? -sum : sum;
    }
    to += (codes + 1) * block;
  }
}

// SUMS: for each table the sixteen sums of its four terms, selected by the bits of the index; then the group's sum.
inline void lay_sums(const Groups& shape, const Route& route, const float* x, float* to) {
  for (std::int64_t g = 0; g < shape.groups; ++g) {
    const std::int64_t start = g * shape.group_size, held = shape.held(g), units = shape.units(g);
    float unit[32];
    for (std::int64_t u = 0; u < units; ++u) {
      const std::int64_t length = std::min(shape.unit_codes, held - u * shape.unit_codes);
      for (std::int64_t k = 0; k < shape.unit_codes; ++k)
        unit[k] = k < length ? x[start + u * shape.unit_codes + k] : 0.0f;
      for (std::int64_t t = 0; t < route.tables; ++t, to += 16) {
        float term[4];
        for (int n = 0; n < 4; ++n) term[n] = unit[route.terms[4 * t + n]] * route.weights[4 * t + n];
        const float low[4] = {0.0f, term[0], term[1], term[0] + term[1]};
        const float high[4] = {0.0f, term[2], term[3], term[2] + term[3]};
        for (int h = 0; h < 4; ++h)
          for (int l = 0; l < 4; ++l) to[4 * h + l] = low[l] + high[h];
      }
    }
    const float sum = group_sum(x + start, held);
    *to++ = shape.negative ? -sum : sum;
  }
}

// One number of 2^e, for -149 <= e <= 127.
inline float power_of_two(std::int64_t e) {
  return from_bits(e < -126 ? 1u << (e + 149) : static_cast<std::uint32_t>(e + 127) << 23);
}

constexpr std::int64_t activation_block = 32;  // elements that share an exponent (lowbit.linear.integer.ACTIVATIONS)

// Lays out the mantissas of a segment in words of four bytes, `apart` elements apart, padded with zeros on both sides.
// Returns their sum.
inline __attribute__((always_inline)) std::int32_t lay_segment(const std::int8_t* from, std::int64_t length,
                                                               std::int64_t start, std::int64_t elements,
                                                               std::int64_t apart, float* to) {
  std::int8_t bytes[(activation_block + 64) / 4 * 4] = {};
  std::memcpy(bytes + start, from, length);
  std::int32_t total = 0;
  for (std::int64_t k = 0; k < length; ++k) total += from[k];
  for (std::int64_t i = 0; i < elements; ++i) std::memcpy(&to[i * apart], bytes + 4 * i, 4);
  return total;
}

// MANTISSAS: for each segment its mantissas, four bytes an element, padded with zeros to whole units, then 2^e; after
// the last segment of a group, the sum of 2^e S.
inline void lay_mantissas(const Groups& shape, const Route& route, const std::int8_t* mantissas,
                          const std::int16_t* exponents, std::int64_t count, std::int64_t blocks, float* to) {
  constexpr std::int64_t whole = activation_block;
  const std::int64_t block = route.rows, quarters = shape.unit_codes / 4;
  for (std::int64_t b = 0, base = 0; base < shape.groups; ++b, base += shape.block_groups) {
    const Sizes& sizes = route.sizes[b];
    float sums[16] = {};
    for (std::int64_t s = 0; s < sizes.segments; ++s) {
      const std::int32_t* const segment = route.segments + 3 * (&sizes.turns[s] - route.sizes[0].turns);
      const std::int64_t first = segment[0], length = segment[1], start = segment[2];
      const std::int64_t elements = (start + length + shape.unit_codes - 1) / shape.unit_codes * quarters;
      const bool usual = length == whole && start == 0 && elements == whole / 4;  // sizes known to the compiler
      for (std::int64_t r = 0; r < count; ++r) {
        const std::int8_t* const from = mantissas + r * shape.rows + first;
        const std::int32_t total = usual ? lay_segment(from, whole, 0, whole / 4, block, to + r)
                                         : lay_segment(from, length, start, elements, block, to + r);
        const float step = power_of_two(exponents[r * blocks + first / whole]);
        to[elements * block + r] = step;
        sums[r] += step * static_cast<float>(total);
      }
      for (std::int64_t i = 0; i <= elements && count < block; ++i)
        std::fill(to + i * block + count, to + (i + 1) * block, 0.0f);
      to += (elements + 1) * block;
      if (sizes.ends[s]) {
        for (std::int64_t r = 0; r < block; ++r) to[r] = shape.negative ? -sums[r] : sums[r], sums[r] = 0.0f;
        to += block;
      }
    }
  }
}

// Activations in blocks of 32 with 8-bit mantissas (lowbit.quantization.bfp.cast): e from the largest magnitude, then
// rint(x / 2^e) saturated at 127. Adding `rounder` rounds to nearest, ties to even. Returns whether x is finite; other
// numbers have no cast. The sizes of whole blocks are constants, so that a compiler can vectorise.
inline bool cast_blocks(const float* x, std::int64_t n, std::int8_t* mantissas, std::int16_t* exponents) {
  bool finite = true;
  const auto cast = [&](std::int64_t start, std::int64_t length) __attribute__((always_inline)) {
    const std::uint32_t largest = largest_bits(x + start, length);
    finite = finite && largest < 0x7F800000u;
    // A normal float is f * 2^E' with E' = exponent bits - 126; e = E' - 7. Subnormal floats have the smallest
    // exponent.
    const std::int64_t e = std::max<std::int64_t>(static_cast<std::int64_t>(largest >> 23) - 133, -127);
    const float inverse = power_of_two(-e);
    for (std::int64_t k = 0; k < length; ++k) {
      const std::int32_t nearest = static_cast<std::int32_t>(to_bits(x[start + k] * inverse + rounder) - to_bits(rounder));
      mantissas[start + k] = static_cast<std::int8_t>(std::min(std::max(nearest, -127), 127));
    }
    exponents[start / activation_block] = static_cast<std::int16_t>(e);
  };
  const std::int64_t whole = n / activation_block * activation_block;
  for (std::int64_t start = 0; start < whole; start += activation_block) cast(start, activation_block);
  if (whole < n) cast(whole, n - whole);
  return finite;
}

}  // namespace lowbit
