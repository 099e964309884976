// Block Floating Point: cast, decode, integer dot products and their sums in float32 (lowbit.quantization.bfp and
// bfp_dot).
//
// Dot products of 8-bit mantissas use a generated kernel if blocks fit registers (block_products.py). The rest is
// written by hand, because blocks have any length and the operations on an element depend on its whole block. Every
// result is exact or rounded once, so no result depends on the compiler.
#pragma once

#include <cmath>
#include <cstdlib>

#include "decode.h"

namespace lowbit {

struct Format {
  std::int64_t block, mantissa, reach;  // elements, bits of a mantissa, largest exponent

  std::int64_t top() const { return (std::int64_t{1} << (mantissa - 1)) - 1; }
  std::int64_t blocks(std::int64_t n) const { return (n + block - 1) / block; }
};

// 2^e of float64, for -1022 <= e <= 1023.
inline double wide_power_of_two(std::int64_t e) {
  const std::uint64_t a = static_cast<std::uint64_t>(e + 1023) << 52;
  double d;
  std::memcpy(&d, &a, sizeof d);
  return d;
}

// The exponent of a block, from its largest magnitude.
inline std::int64_t exponent_of(const float* x, std::int64_t n, const Format& format) {
  const float largest = from_bits(largest_bits(x, n));
  if (largest == 0) return -format.reach;
  int power;
  std::frexp(largest, &power);
  return std::min(std::max(power - 1 - (format.mantissa - 2), -format.reach), format.reach);
}

// rint(x * inverse), saturated. Adding `integers` rounds to nearest, ties to even; the low bits are the result.
template <class Real, class Bits, class Mantissa>
inline void round_block(const float* __restrict x, std::int64_t n, Real inverse, Real top, Real integers,
                        Mantissa* __restrict mantissas) {
  for (std::int64_t k = 0; k < n; ++k) {
    const Real scaled = static_cast<Real>(x[k]) * inverse;  // exact, or far below one half
    const Real below = scaled < top ? scaled : top;
    const Real shifted = (below > -top ? below : -top) + integers;
    Bits a;
    std::memcpy(&a, &shifted, sizeof a);
    mantissas[k] = static_cast<Mantissa>(a);
  }
}

// Powers of two from 2^-127 to 2^127 are float32, which is enough for narrow mantissas with an 8-bit exponent.
template <class Mantissa>
inline void cast_row(const float* x, std::int64_t n, const Format& format, Mantissa* mantissas,
                     std::int16_t* exponents) {
  for (std::int64_t start = 0; start < n; start += format.block) {
    const std::int64_t length = std::min(format.block, n - start), e = exponent_of(x + start, length, format);
    if (sizeof(Mantissa) == 1 && e >= -127 && e <= 127)
      round_block<float, std::uint32_t>(x + start, length, power_of_two(-e), static_cast<float>(format.top()),
                                        rounder, mantissas + start);
    else
      round_block<double, std::uint64_t>(x + start, length, wide_power_of_two(-e), static_cast<double>(format.top()),
                                         6755399441055744.0, mantissas + start);
    exponents[start / format.block] = static_cast<std::int16_t>(e);
  }
}

// M * 2^e rounded once: the product of two exact numbers.
template <class Real, class Mantissa>
inline void scale_block(const Mantissa* __restrict mantissas, std::int64_t n, Real step, float* __restrict out) {
  for (std::int64_t k = 0; k < n; ++k) out[k] = static_cast<float>(static_cast<Real>(mantissas[k]) * step);
}

template <class Mantissa>
inline void decode_row(const Mantissa* mantissas, const std::int16_t* exponents, std::int64_t n, std::int64_t block,
                       float* out) {
  for (std::int64_t start = 0; start < n; start += block) {
    const std::int64_t length = std::min(block, n - start), e = exponents[start / block];
    if (sizeof(Mantissa) == 1 && e >= -127 && e <= 127)
      scale_block(mantissas + start, length, power_of_two(e), out + start);
    else
      scale_block(mantissas + start, length, wide_power_of_two(e), out + start);
  }
}

// **Dot products** of R rows with S rows of n elements: sums, R x S x P for P blocks, and the sums of their exponents.
struct Operand {
  const void* mantissas;
  const std::int16_t* exponents;
  std::int64_t rows;
};

inline void add_exponents(const Operand& a, const Operand& b, std::int64_t blocks, std::int64_t first,
                          std::int64_t last, std::int32_t* exponents) {
  for (std::int64_t r = 0; r < a.rows; ++r)
    for (std::int64_t s = first; s < last; ++s)
      for (std::int64_t j = 0; j < blocks; ++j)
        exponents[(r * b.rows + s) * blocks + j] = a.exponents[r * blocks + j] + b.exponents[s * blocks + j];
}

// Mantissas of any width, as 32-bit integers.
inline Status dot(Pool& pool, const Operand& a, const Operand& b, std::int64_t n, std::int64_t block,
                  std::int64_t* sums, std::int32_t* exponents) {
  const std::int64_t blocks = (n + block - 1) / block;
  return spread(pool, b.rows, 2 * a.rows * n, [&](std::int64_t first, std::int64_t last) {
    const auto row = [n](const Operand& x, std::int64_t r) {
      return static_cast<const std::int32_t*>(x.mantissas) + r * n;
    };
    for (std::int64_t r = 0; r < a.rows; ++r)
      for (std::int64_t s = first; s < last; ++s)
        for (std::int64_t j = 0; j < blocks; ++j) {
          std::int64_t sum = 0;
          for (std::int64_t k = j * block; k < std::min((j + 1) * block, n); ++k)
            sum += static_cast<std::int64_t>(row(a, r)[k]) * row(b, s)[k];
          sums[(r * b.rows + s) * blocks + j] = sum;
        }
    add_exponents(a, b, blocks, first, last, exponents);
  });
}

// 8-bit mantissas, in blocks for which there is a kernel: it takes `kernels.lanes` blocks of b per iteration.
inline Status dot_bytes(const KernelSet& kernels, const Operand& a, const Operand& b, std::int64_t n,
                        std::int64_t blocks, std::int64_t* sums, std::int32_t* exponents) {
  constexpr std::int64_t most = 512;  // sums at once
  const std::int64_t lanes = kernels.lanes, rows_each = lanes / blocks;
  const std::int64_t iterations = (b.rows + rows_each - 1) / rows_each, work = a.rows * n * rows_each / 4;
  const std::int64_t bytes = (a.rows + rows_each) * n;
  return spread_with(*kernels.pool, iterations, work, bytes, [&](std::int64_t first, std::int64_t last, void* room) {
    std::uint8_t *const plus_128 = static_cast<std::uint8_t*>(room), *const copy = plus_128 + a.rows * n;
    const std::uint8_t* const from_a = static_cast<const std::uint8_t*>(a.mantissas);
    const std::uint8_t* const from_b = static_cast<const std::uint8_t*>(b.mantissas);
    for (std::int64_t k = 0; k < a.rows * n; ++k) plus_128[k] = from_a[k] ^ 0x80;
    alignas(64) float found[most];
    const auto take = [&](const std::uint8_t* rows, std::int64_t s, std::int64_t count) {
      for (std::int64_t r = 0; r < a.rows; ++r) {
        const std::int64_t wanted = std::min(count * rows_each, b.rows - s) * blocks;
        kernels.call[0](reinterpret_cast<const std::uint32_t*>(rows),
                       reinterpret_cast<const std::uint32_t*>(plus_128 + r * n), nullptr, nullptr, found, Sizes{count});
        for (std::int64_t i = 0; i < wanted; ++i) {
          std::int32_t one;
          std::memcpy(&one, found + i, sizeof one);
          sums[(r * b.rows + s) * blocks + i] = one;
        }
      }
    };
    const std::int64_t whole = std::min(last, b.rows / rows_each);
    for (std::int64_t iteration = first; iteration < whole; iteration += most / lanes)
      take(from_b + iteration * rows_each * n, iteration * rows_each, std::min(most / lanes, whole - iteration));
    if (whole < last) {
      const std::int64_t s = whole * rows_each;
      std::memset(copy, 0, rows_each * n);
      std::memcpy(copy, from_b + s * n, (b.rows - s) * n);
      take(copy, s, 1);
    }
    add_exponents(a, b, blocks, first * rows_each, std::min(last * rows_each, b.rows), exponents);
  });
}

// y + s * 2^e rounded once: the sum in float64 is rounded to odd, so that rounding it to float32 gives the rounding of
// the exact sum (lowbit.quantization.bfp_dot.add_rounded_once). Knuth's sum gives the error of the first rounding.
inline float add_rounded_once(float y, std::int64_t s, std::int32_t e) {
  const double integer = static_cast<double>(s), wide = y;
  const double term = e > -900 && e < 900 ? integer * wide_power_of_two(e) : std::ldexp(integer, e);
  double sum = wide + term;
  const double part = sum - wide;
  const double lost = (wide - (sum - part)) + (term - part);
  std::uint64_t a;
  std::memcpy(&a, &sum, sizeof a);
  if (lost != 0 && (a & 1) == 0 && std::isfinite(sum)) {
    a += (lost > 0) == (sum > 0) ? 1 : -1;
    std::memcpy(&sum, &a, sizeof a);
  }
  return static_cast<float>(sum);
}

inline Status total(Pool& pool, const std::int64_t* sums, const std::int32_t* exponents, std::int64_t count,
                    std::int64_t blocks, float* out) {
  return spread(pool, count, 16 * blocks, [&](std::int64_t first, std::int64_t last) {
    for (std::int64_t i = first; i < last; ++i) {
      float y = 0;
      for (std::int64_t j = i * blocks; j < (i + 1) * blocks; ++j) y = add_rounded_once(y, sums[j], exponents[j]);
      out[i] = y;
    }
  });
}

namespace bridge {

// Does nothing for 0 rows, whatever the addresses.

// Calls `call` with a mantissa type of this many bytes.
template <class Call> int with_mantissa(int bytes, const Call& call) {
  return bytes == 1 ? call(std::int8_t{}) : bytes == 2 ? call(std::int16_t{}) : call(std::int32_t{});
}

inline int cast(std::uintptr_t pool, const float* x, std::int64_t rows, std::int64_t n, std::int64_t block,
                std::int64_t mantissa, std::int64_t reach, int bytes, void* mantissas, std::int16_t* exponents) {
  if (rows == 0) return OK;
  const Format format{block, mantissa, reach};
  return with_mantissa(bytes, [&](auto one) {
    auto* const to = static_cast<decltype(one)*>(mantissas);
    return spread(*reinterpret_cast<Pool*>(pool), rows, 4 * n, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t r = first; r < last; ++r)
        cast_row(x + r * n, n, format, to + r * n, exponents + r * format.blocks(n));
    });
  });
}

inline int decode(std::uintptr_t pool, const void* mantissas, const std::int16_t* exponents, std::int64_t rows,
                  std::int64_t n, std::int64_t block, int bytes, float* out) {
  if (rows == 0) return OK;
  const std::int64_t blocks = (n + block - 1) / block;
  return with_mantissa(bytes, [&](auto one) {
    const auto* const from = static_cast<const decltype(one)*>(mantissas);
    return spread(*reinterpret_cast<Pool*>(pool), rows, 2 * n, [&](std::int64_t first, std::int64_t last) {
      for (std::int64_t r = first; r < last; ++r)
        decode_row(from + r * n, exponents + r * blocks, n, block, out + r * n);
    });
  });
}

inline int dot(std::uintptr_t pool, const void* a, const std::int16_t* a_exponents, std::int64_t a_rows, const void* b,
               const std::int16_t* b_exponents, std::int64_t b_rows, std::int64_t n, std::int64_t block,
               std::int64_t* sums, std::int32_t* exponents) {
  if (a_rows == 0) return OK;
  return lowbit::dot(*reinterpret_cast<Pool*>(pool), {a, a_exponents, a_rows}, {b, b_exponents, b_rows}, n, block, sums,
                     exponents);
}

inline int dot_bytes(std::uintptr_t kernels, const void* a, const std::int16_t* a_exponents, std::int64_t a_rows,
                     const void* b, const std::int16_t* b_exponents, std::int64_t b_rows, std::int64_t n,
                     std::int64_t blocks, std::int64_t* sums, std::int32_t* exponents) {
  if (a_rows == 0) return OK;
  return lowbit::dot_bytes(*at<KernelSet>(kernels), {a, a_exponents, a_rows}, {b, b_exponents, b_rows}, n, blocks, sums,
                           exponents);
}

inline int total(std::uintptr_t pool, const std::int64_t* sums, const std::int32_t* exponents, std::int64_t count,
                 std::int64_t blocks, float* out) {
  return count == 0 ? OK : lowbit::total(*reinterpret_cast<Pool*>(pool), sums, exponents, count, blocks, out);
}

}  // namespace bridge
}  // namespace lowbit
