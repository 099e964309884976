// Keys and values as stored in a cache: rows of one head, in float32, float16 or BFP12 (lowbit.model.caches).
//
// A row is cast when it is written. Attention reads rows in float32, 64 tokens at once. So a tile is widened into the
// first-level cache, where all query heads of its group read it.
#pragma once

#include "blocks.h"
#include "casts.h"

namespace lowbit {

constexpr int BFP12 = 3;  // in addition to the values of Type
constexpr std::int64_t key_block = 32;  // channels that share an exponent (lowbit.model.caches.BLOCK)

constexpr int unkept = 10;  // status of a step with a finite key or value that is infinite in float16

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

// The values of one block: 16 bytes with two mantissas each, the first in the low half. Each mantissa becomes a byte,
// plus 8. This is done on whole words, so that a compiler can vectorise the loops.
inline void decode_block(const std::uint8_t* pairs, float step, float* __restrict out) {
  std::uint8_t each[key_block];
  for (int n = 0; n < 4; ++n) {
    std::uint32_t word;
    std::memcpy(&word, pairs + 4 * n, sizeof word);
    std::uint64_t bytes = word;
    bytes = (bytes | bytes << 16) & 0x0000FFFF0000FFFFu;
    bytes = (bytes | bytes << 8) & 0x00FF00FF00FF00FFu;
    bytes = ((bytes | bytes << 4) & 0x0F0F0F0F0F0F0F0Fu) ^ 0x0808080808080808u;
    std::memcpy(each + 8 * n, &bytes, sizeof bytes);
  }
  for (std::int64_t c = 0; c < key_block; ++c) out[c] = static_cast<float>(static_cast<std::int32_t>(each[c]) - 8) * step;
}

inline void decode_bfp12(const std::uint8_t* row, std::int64_t d, float* out) {
  const std::uint8_t* const exponents = row + (d + 1) / 2;
  for (std::int64_t start = 0; start < d; start += key_block) {
    const float step = power_of_two(static_cast<std::int64_t>(exponents[start / key_block]) - 127);
    const std::int64_t left = d - start;
    if (left >= key_block) {
      decode_block(row + start / 2, step, out + start);
    } else {
      std::uint8_t pairs[key_block / 2] = {};
      float whole[key_block];
      std::memcpy(pairs, row + start / 2, (left + 1) / 2);
      decode_block(pairs, step, whole);
      std::memcpy(out + start, whole, left * sizeof(float));
    }
  }
}

// Writes the row with this number; returns OK, or the reason why it cannot be stored.
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

  const float* operator()(std::int64_t first, std::int64_t left, std::int64_t least, float* copy) const {
    if (type == FLOAT32) return rows_at(kernels, shape, reinterpret_cast<const float*>(rows), first, left, least, copy);
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
