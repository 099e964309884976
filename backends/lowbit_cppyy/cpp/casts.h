// Casts of activations to 8 bits, as `lowbit.tensor_formats` specifies them: a row is a token.
//
// Among the choices that kernels have: Q8_0 and Q8_1 multiply by 1/d, int8 by 127/m, and ties go to even. Loops are
// written so that a compiler can vectorise them without changing a rounding: maxima of bits, and rounding by an
// addition.
#pragma once

#include "decode.h"
#include "stored.h"

namespace lowbit {

enum Cast { Q8_0, Q8_1, Q8_K, INT8 };  // stored/casts.py
enum CastStatus { TOO_SMALL = 6, TOO_LARGE = 7, NOT_FINITE = 8 };

// The nearest integers to x * factor, whose products are at most 2^22 in magnitude, up to `top`; their sum. The product
// is rounded separately: a compiler may fuse it with the addition within one expression, but these are two.
inline std::int32_t round_products(const float* x, std::int64_t n, float factor, std::int32_t top, std::int8_t* codes) {
  std::int32_t sum = 0;
  for (std::int64_t i = 0; i < n; ++i) {
    const float product = x[i] * factor;
    const float shifted = product + rounder;
    const std::int32_t nearest = static_cast<std::int32_t>(to_bits(shifted) - to_bits(rounder));
    const std::int32_t code = nearest > top ? top : nearest;
    codes[i] = static_cast<std::int8_t>(code);
    sum += code;
  }
  return sum;
}

inline bool infinite(float x) { return (to_bits(x) & 0x7FFFFFFFu) >= 0x7F800000u; }  // or NaN
inline bool infinite_half(std::uint16_t h) { return (h & 0x7C00u) == 0x7C00u; }

// One block of Q8_0 or Q8_1: float16 d, for Q8_1 float16 s = d * sum of the codes, codes.
inline int cast_eight(const float* x, bool with_sum, std::uint8_t* out) {
  const float most = from_bits(largest_bits(x, 32));
  if (infinite(most)) return NOT_FINITE;
  const float d = most / 127.0f, factor = d == 0 ? 0.0f : 1 / d;
  if (infinite(factor)) return TOO_SMALL;
  std::int8_t codes[32];
  const std::int32_t sum = round_products(x, 32, factor, 127, codes);
  const std::uint16_t kept[2] = {narrow_half(d), narrow_half(d * static_cast<float>(sum))};
  if (infinite_half(kept[0]) || (with_sum && infinite_half(kept[1]))) return TOO_LARGE;
  std::memcpy(out, kept, with_sum ? 4 : 2);
  std::memcpy(out + (with_sum ? 4 : 2), codes, 32);
  return OK;
}

// One block of Q8_K: float32 d, codes, the sums of 16 codes each. The first number with the largest magnitude becomes
// -127.
inline int cast_k(const float* x, std::uint8_t* out) {
  const std::uint32_t most = largest_bits(x, 256);
  if (infinite(from_bits(most))) return NOT_FINITE;
  std::int64_t first = 0;
  while ((to_bits(x[first]) & 0x7FFFFFFFu) != most) ++first;
  const float factor = most == 0 ? 0.0f : -(127.0f / x[first]);
  if (infinite(factor)) return TOO_SMALL;
  const float d = factor == 0 ? 0.0f : 1 / factor;
  std::int16_t sums[16];
  std::int8_t codes[256];
  for (int part = 0; part < 16; ++part)
    sums[part] = static_cast<std::int16_t>(round_products(x + 16 * part, 16, factor, 127, codes + 16 * part));
  std::memcpy(out, &d, 4);
  std::memcpy(out + 4, codes, 256);
  std::memcpy(out + 260, sums, 32);
  return OK;
}

// A row in int8: the codes, and their scale in float32.
inline int cast_row_to_int8(const float* x, std::int64_t n, std::int8_t* codes, float* scale) {
  const float m = from_bits(largest_bits(x, n));
  if (infinite(m)) return NOT_FINITE;
  const float factor = m == 0 ? 0.0f : 127.0f / m;
  if (infinite(factor)) return TOO_SMALL;
  round_products(x, n, factor, 127, codes);
  *scale = m / 127.0f;
  return OK;
}

constexpr std::int64_t most_bytes = 292;  // of a block

inline std::int64_t block_of(Cast cast, std::int64_t n) { return cast == INT8 ? n : cast == Q8_K ? 256 : 32; }

// A float32 scale rounded to a type.
inline int kept_scale(float* scale, Type type) {
  if (type == FLOAT32) return OK;
  const std::uint16_t bits = type == FLOAT16 ? narrow_half(*scale) : narrow_brain(*scale);
  *scale = type == FLOAT16 ? widen_half(bits) : from_bits(static_cast<std::uint32_t>(bits) << 16);
  if (infinite(*scale)) return TOO_LARGE;
  return OK;
}

// A row as the codes and the scales of its blocks; `type` is that of the scale of a row in int8.
inline int cast_row(Cast cast, Type type, const float* x, std::int64_t n, std::int8_t* codes, float* scales) {
  if (cast == INT8) {
    const int found = cast_row_to_int8(x, n, codes, scales);
    return found == OK ? kept_scale(scales, type) : found;
  }
  const std::int64_t block = block_of(cast, n), head = cast == Q8_0 ? 2 : 4;
  std::uint8_t bytes[most_bytes];
  for (std::int64_t at = 0; at < n / block; ++at) {
    const int found = cast == Q8_K ? cast_k(x + at * block, bytes) : cast_eight(x + at * block, cast == Q8_1, bytes);
    if (found != OK) return found;
    std::uint16_t half;
    std::memcpy(&half, bytes, 2);
    if (cast == Q8_K) std::memcpy(scales + at, bytes, 4);
    else scales[at] = widen_half(half);
    std::memcpy(codes + at * block, bytes + head, block);
  }
  return OK;
}

// Calls `each(row, numbers)` for every row of x, widened to float32; returns the status of a row that failed, if any.
template <class Each>
int each_row(Pool& pool, const std::uint8_t* x, std::int64_t type, std::int64_t rows, std::int64_t n, const Each& each) {
  const std::int64_t bytes = n * (type == FLOAT32 ? 4 : 2);
  std::atomic<int> failed{OK};
  const std::int64_t room = type == FLOAT32 ? 1 : n * sizeof(float);
  const Status status = spread_with(pool, rows, 4 * n, room, [&](std::int64_t start, std::int64_t stop, void* wide) {
    for (std::int64_t row = start; row < stop; ++row) {
      const float* from = reinterpret_cast<const float*>(x + row * bytes);
      if (type != FLOAT32) {
        widen(x + row * bytes, type, n, static_cast<float*>(wide));
        from = static_cast<const float*>(wide);
      }
      const int found = each(row, from);
      if (found != OK) failed.store(found);
    }
  });
  return status == OK ? failed.load() : status;
}

// Y = X W for T rows, which are cast first.
inline int multiply_stored_cast(const Linear& linear, const StoredRoute& own, Cast cast, Type kept,
                                const std::uint8_t* x, std::int64_t x_type, void* out, std::int64_t out_type,
                                std::int64_t T) {
  const std::int64_t K = linear.shape.rows, block = block_of(cast, K), parts = K / block;
  const Scratch room = scratch(T * (parts * sizeof(float) + K));
  if (!room) return NO_MEMORY;
  float* const scales = static_cast<float*>(room.get());
  std::int8_t* const codes = reinterpret_cast<std::int8_t*>(scales + T * parts);
  const int status = each_row(*linear.pool, x, x_type, T, K, [&](std::int64_t row, const float* from) {
    return cast_row(cast, kept, from, K, codes + row * K, scales + row * parts);
  });
  return status == OK ? multiply_stored_bytes(linear, own, codes, scales, block, out, out_type, T) : status;
}

// `out` holds the blocks of all rows, or the codes of int8, whose scales go to `scales`. `x` has elements of `type`.
inline int cast_rows(Pool& pool, Cast cast, const std::uint8_t* x, std::int64_t type, std::int64_t rows, std::int64_t n,
                     std::uint8_t* out, float* scales) {
  const std::int64_t block = block_of(cast, n), bytes = cast == Q8_K ? 292 : cast == Q8_1 ? 36 : 34;
  return each_row(pool, x, type, rows, n, [&](std::int64_t row, const float* from) -> int {
    if (cast == INT8) return cast_row_to_int8(from, n, reinterpret_cast<std::int8_t*>(out) + row * n, scales + row);
    int found = OK;
    for (std::int64_t at = 0; at < n / block && found == OK; ++at) {
      std::uint8_t* const to = out + (row * (n / block) + at) * bytes;
      found = cast == Q8_K ? cast_k(from + at * block, to) : cast_eight(from + at * block, cast == Q8_1, to);
    }
    return found;
  });
}

namespace bridge {

inline int cast_activations(std::uintptr_t pool, int cast, const std::uint8_t* x, std::int64_t type, std::int64_t rows,
                            std::int64_t n, std::uint8_t* out, float* scales) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return cast_rows(*reinterpret_cast<Pool*>(pool), static_cast<Cast>(cast), x, type, rows, n, out, scales);
}

// `kept`: the type of the scales of int8.
inline int multiply_stored_cast(std::uintptr_t linear, std::uintptr_t route, int cast, std::int64_t kept,
                                const std::uint8_t* x, std::int64_t x_type, std::uint8_t* out, std::int64_t out_type,
                                std::int64_t rows) {
  if (rows == 0) return OK;
  const StandardArithmetic arithmetic;
  return lowbit::multiply_stored_cast(*at<Linear>(linear), *at<StoredRoute>(route), static_cast<Cast>(cast),
                                      static_cast<Type>(kept), x, x_type, out, out_type, rows);
}

}  // namespace bridge
}  // namespace lowbit
