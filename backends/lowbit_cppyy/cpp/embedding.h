// The rows of tokens in an embedding, decoded from where they are stored: floats, codes with scales and zeros, or blocks
// of ggml. A step that reads several tokens in one call takes its rows from here. What differs between formats is data,
// which step/embedding.py makes.
#pragma once

#include "stored.h"

namespace lowbit {

// Some bits of a number: `mask` of a byte of a block, after a shift down by `low`, and then up by `to`.
struct Bits {
  std::int32_t byte, low, mask, to;
};

// The numbers of a few bits in a block: each is the sum of `parts` entries and `base`, modulo 256.
struct Numbers {
  std::int64_t bits, parts, base;  // `bits`: the address of the entries

  std::uint8_t operator()(const std::uint8_t* block, std::int64_t number) const {
    const Bits* const own = reinterpret_cast<const Bits*>(bits) + number * parts;
    std::int64_t sum = base;
    for (std::int64_t n = 0; n < parts; ++n) sum += (block[own[n].byte] >> own[n].low & own[n].mask) << own[n].to;
    return static_cast<std::uint8_t>(sum);
  }
};

enum class Values : std::int64_t { codes, bytes, table };
enum class Offset : std::int64_t { none, center, number, minimum };

// A format of blocks: w = d t v(q) + o, in the names of stored/parts.py. Bytes are counted from the start of a block.
struct BlockFormat {
  std::int64_t elements, bytes, run;  // `run`: the elements that share an integer t
  Numbers codes, integers;            // the integers of all runs, and then their minima; no parts for none
  Values values;
  std::int64_t table;  // the address of sixteen floats
  Offset offset;
  std::int64_t center, scale, exponents, second;  // the bytes of d and of d' or o; whether d is an exponent
};

// Codes in words, K x N, with scales and zeros, G x N; their addresses.
struct CodeFormat {
  std::int64_t columns, bits, group_size, scales, zeros, type, minimum;  // `type`: one of Type, of scales and minima
};

// An embedding. The fields are integers of 64 bits, as Python gives them.
struct Embedding {
  enum class Kind : std::int64_t { none, floats, codes, blocks };

  Kind kind;
  std::int64_t hidden, scale;          // `scale`: the bits of a double that each number is multiplied by
  std::int64_t data, row_bytes, type;  // `type`: one of Type, of floats
  CodeFormat code;
  BlockFormat block;
};
static_assert(sizeof(Embedding) == 29 * sizeof(std::int64_t));

inline double half_at(const std::uint8_t* at) {
  std::uint16_t h;
  std::memcpy(&h, at, sizeof h);
  return static_cast<double>(widen_half(h));
}

// The numbers of a block, each rounded once, as the format's chapter adds its two terms.
inline void decode_block(const BlockFormat& format, const std::uint8_t* block, float* to) {
  const double d = format.exponents ? std::ldexp(1.0, block[format.scale] - 127) : half_at(block + format.scale);
  const double second = format.offset == Offset::number || format.offset == Offset::minimum ? half_at(block + format.second) : 0.0;
  const float* const table = reinterpret_cast<const float*>(format.table);
  const std::int64_t runs = format.elements / format.run;
  for (std::int64_t r = 0; r < runs; ++r) {
    const double scale = format.integers.parts ? d * static_cast<std::int8_t>(format.integers(block, r)) : d;
    double offset = 0.0;
    if (format.offset == Offset::center) offset = -(static_cast<double>(format.center) * scale);
    if (format.offset == Offset::number) offset = second;
    if (format.offset == Offset::minimum) offset = -(second * format.integers(block, runs + r));
    for (std::int64_t e = r * format.run; e < (r + 1) * format.run; ++e) {
      const std::uint8_t code = format.codes(block, e);
      double value = code;
      if (format.values == Values::bytes) value = static_cast<double>(code) - 128.0;
      if (format.values == Values::table) value = static_cast<double>(table[code & 15]);
      const double product = scale * value;
      to[e] = static_cast<float>(product + offset);
    }
  }
}

// Column `token` of a matrix of codes, in float32 as `dequantize` computes it.
inline void decode_codes(const Embedding& from, std::int64_t token, float* to) {
  const CodeFormat& format = from.code;
  const std::uint32_t* const words = reinterpret_cast<const std::uint32_t*>(from.data) + token;
  const std::int64_t wide = format.type == FLOAT32 ? 4 : 2;
  float scale = 0, zero = 0;
  for (std::int64_t k = 0; k < from.hidden; ++k) {
    if (k % format.group_size == 0) {
      const std::int64_t at = k / format.group_size * format.columns + token;
      widen(reinterpret_cast<const char*>(format.scales) + at * wide, format.type, 1, &scale);
      if (format.minimum) widen(reinterpret_cast<const char*>(format.zeros) + at * wide, format.type, 1, &zero);
      else zero = static_cast<float>(reinterpret_cast<const std::uint8_t*>(format.zeros)[at]);
    }
    const std::int64_t bit = k * format.bits, shift = bit % 32;
    std::uint32_t code = words[bit / 32 * format.columns] >> shift;
    if (shift + format.bits > 32) code |= words[(bit / 32 + 1) * format.columns] << (32 - shift);
    code &= (1u << format.bits) - 1;
    const float q = static_cast<float>(code);
    if (format.minimum) {
      const float product = scale * q;
      to[k] = product + zero;
    } else {
      to[k] = scale * (q - zero);
    }
  }
}

// The row of a token, times the factor of the embedding.
inline void embed(const Embedding& from, std::int64_t token, float* to) {
  const std::uint8_t* const row = reinterpret_cast<const std::uint8_t*>(from.data) + token * from.row_bytes;
  if (from.kind == Embedding::Kind::floats) widen(row, from.type, from.hidden, to);
  if (from.kind == Embedding::Kind::codes) decode_codes(from, token, to);
  if (from.kind == Embedding::Kind::blocks)
    for (std::int64_t b = 0; b < from.hidden / from.block.elements; ++b)
      decode_block(from.block, row + b * from.block.bytes, to + b * from.block.elements);
  double scale;
  std::memcpy(&scale, &from.scale, sizeof scale);
  for (std::int64_t k = 0; k < from.hidden; ++k) to[k] = static_cast<float>(scale * static_cast<double>(to[k]));
}

}  // namespace lowbit
