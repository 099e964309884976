// Keys and values as a cache keeps them: rows of one head, in float32, float16 or BFP12 (lowbit.model.caches).
//
// A row is cast when it is written. Attention reads rows in float32, those of 64 tokens at once, so a tile is widened
// into the first cache of the processor and read there by all query heads of its group.
#pragma once

#include "blocks.h"
#include "casts.h"

namespace lowbit {

constexpr int BFP12 = 3;  // beside the values of Type
constexpr std::int64_t key_block = 32;  // channels that share an exponent (lowbit.model.caches.BLOCK)

constexpr int unkept = 10;  // status of a step with a key or value that is finite, and infinite in float16

inline std::int64_t key_blocks(std::int64_t d) { return (d + key_block - 1) / key_block; }

// Bytes of a row of d channels. In BFP12 the mantissas come first, then the exponents, as
// `lowbit.quantization.bfp_storage` has both.
inline std::int64_t row_bytes(std::int64_t type, std::int64_t d) {
  return type == BFP12 ? (d + 1) / 2 + key_blocks(d) : type == FLOAT16 ? 2 * d : 4 * d;
}

inline void cast_bfp12(const float* x, std::int64_t d, std::uint8_t* row) {
  const Format format{key_block, 4, 127};
  std::uint8_t* const exponents = row + (d + 1) / 2;
  for (std::int64_t start = 0; start < d; start += key_block) {
    const std::int64_t length = std::min(key_block, d - start);
    std::int8_t mantissas[key_block] = {};
    std::int16_t exponent;
    cast_row(x + start, length, format, mantissas, &exponent);
    for (std::int64_t i = 0; i < (length + 1) / 2; ++i)
      row[start / 2 + i] = static_cast<std::uint8_t>((mantissas[2 * i] & 15) | (mantissas[2 * i + 1] & 15) << 4);
    exponents[start / key_block] = static_cast<std::uint8_t>(exponent + 127);
  }
}

inline void decode_bfp12(const std::uint8_t* row, std::int64_t d, float* out) {
  const std::uint8_t* const exponents = row + (d + 1) / 2;
  for (std::int64_t start = 0; start < d; start += key_block) {
    const std::int64_t length = std::min(key_block, d - start);
    const float step = power_of_two(static_cast<std::int64_t>(exponents[start / key_block]) - 127);
    std::int8_t mantissas[key_block];
    for (std::int64_t i = 0; i < (length + 1) / 2; ++i) {
      const std::uint8_t both = row[start / 2 + i];
      mantissas[2 * i] = static_cast<std::int8_t>(static_cast<std::int8_t>(both << 4) >> 4);
      mantissas[2 * i + 1] = static_cast<std::int8_t>(static_cast<std::int8_t>(both) >> 4);
    }
    scale_block(mantissas, length, step, out + start);
  }
}

// Writes the row with this number; OK, or why it cannot be kept.
inline int keep_row(std::int64_t type, const float* x, std::int64_t d, std::int64_t number, std::uint8_t* rows) {
  std::uint8_t* const row = rows + number * row_bytes(type, d);
  if (type == FLOAT32) {
    std::memcpy(row, x, d * sizeof(float));
    return OK;
  }
  if (type == FLOAT16) {
    narrow(x, FLOAT16, d, row);
    for (std::int64_t c = 0; c < d; ++c)
      if ((to_bits(x[c]) & 0x7FFFFFFFu) - 0x477FF000u < 0x7F800000u - 0x477FF000u) return unkept;  // 65520 and above
    return OK;
  }
  if (largest_bits(x, d) >= 0x7F800000u) return NOT_FINITE;
  cast_bfp12(x, d, row);
  return OK;
}

// Rows of a head for `attend_heads`: in float32, in place or in the copy.
struct KeptRows {
  const KernelSet& kernels;
  const Heads& shape;
  std::int64_t type;
  const std::uint8_t* rows;

  const float* operator()(std::int64_t first, std::int64_t left, float* copy) const {
    if (type == FLOAT32) return rows_at(kernels, shape, reinterpret_cast<const float*>(rows), first, left, copy);
    const std::int64_t d = shape.d, each = row_bytes(type, d), seen = std::min(left, chunk);
    const std::uint8_t* const from = rows + first * each;
    if (type == FLOAT16) {
      const std::int64_t whole = seen * d / chunk;
      if (whole > 0) kernels.call[6](reinterpret_cast<const std::uint32_t*>(from), nullptr, nullptr, nullptr, copy, Sizes{whole});
      widen(from + 2 * whole * chunk, FLOAT16, seen * d - whole * chunk, copy + whole * chunk);
    } else {
      for (std::int64_t u = 0; u < seen; ++u) decode_bfp12(from + u * each, d, copy + u * d);
    }
    fill_behind(kernels, shape, seen, copy);
    return copy;
  }
};

}  // namespace lowbit
