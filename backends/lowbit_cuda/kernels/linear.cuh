// Products with quantised matrices: Y = X W for a few tokens, each weight read once.
//
// **Who computes what.** A block computes a panel of 32 columns. A thread computes four columns over a part of the
// rows: eight threads side by side cover the panel, and read 128 bytes of a row of words between them. Rows are dealt
// out in segments of up to 64 (32 of 8 bits) to the 32 slices, eight threads each, in turn. At the end the sums of the
// slices are added: of the four in a warp by shuffles, of the eight warps one after the other. For given rows and
// groups the order of a column's sum is therefore always the same, whatever N, however many tokens come along, and
// whichever of the ways below computes it.
//
// **Activations** lie in shared memory, a slot for each segment: the numbers that are multiplied, zeros after the last
// where a segment is short, and the sums over groups, which every column needs for its zeros.
//
// **From a code to a product** costs two instructions. A word without all bits but those of one code is a float: a
// code q at bit p, p at most 24 - b, is q 2^(p - 149), a subnormal number or one just above, which multiplications take
// as they take any other. The power of two is made good by multiplying the activation by 2^(75 - p) when it is put into
// shared memory. What comes out is x q 2^-74: one LOP3 and one FFMA a code, and a shift for codes above bit 24.
//
// This is exact, rounding for rounding, where each |x| is 0 or in [2^-52, 2^53): nothing overflows, and x q 2^-74 and
// all sums of such are multiples of 2^-149, which subnormal numbers hold exactly. A block that meets another x stores
// activations as they are and turns codes into floats first, which costs two instructions more a code. Both ways make
// the same bits, and NaN and infinities take the second.
#pragma once

#include "codes.cuh"

constexpr int32_t SHIFTED = 75;
constexpr float DESCALED = 0x1p74f;
constexpr uint32_t LEAST = power_bits(-52), RANGE = power_bits(53) - power_bits(-52);

// **Activations to shared memory**, of as many segments as fit, for all tokens of a block.
template <int BITS, int TOKENS>
struct Activations {
  static constexpr int32_t SEGMENT = Code<BITS>::SEGMENT, STRIDE = SEGMENT + 4;
  static constexpr int32_t MOST = 16384 / SEGMENT / TOKENS;  // segments

  const float* x;  // of the block's first token
  int32_t tokens;  // of the block
  int32_t slots;   // of each token
  Shared<float> held;

  __device__ Activations(const float* all_x, int32_t all_tokens, int32_t rows) : slots(0), held(0) {
    const int32_t first = blockIdx.y * TOKENS, left = all_tokens - first;
    x = all_x + static_cast<size_t>(first) * rows;
    tokens = left < TOKENS ? left : TOKENS;
  }

  __device__ float4 get4(int32_t token, int32_t slot, int32_t row) const {
    const int32_t at = (token * slots + slot) * STRIDE + row;
    return TOKENS == 1 ? held.read4(at) : held.get4(at);  // one token: again for each matrix, which share no registers
  }

  // The sum over the group that ends with a piece, or over as much of it as the segment has.
  __device__ float sum(int32_t token, int32_t slot, int32_t piece) const {
    return held.get((token * slots + slot) * STRIDE + SEGMENT + piece);
  }

  // Fill the slots with segments from `base` on. All threads meet here, and may read afterwards. The result says
  // whether all numbers were such that codes may be taken for floats.
  __device__ bool stage(const Segments<BITS>& all, int32_t base, bool scaled) const {
    constexpr int32_t WIDTH = SEGMENT / 4, STEP = THREADS / WIDTH;
    const int32_t quad = threadIdx.x % WIDTH * 4;
    float factors[4];
    UNROLL for (int32_t i = 0; i < 4; i++) {
      factors[i] = scaled ? power_of_two(SHIFTED - Code<BITS>::place(quad + i)) : 1.0f;
    }
    Walk<BITS> walk(all, base + threadIdx.x / WIDTH, STEP);
    bool others = false;
    for (int32_t i = 0; i < slots / STEP; i++, walk.advance()) {
      const int32_t slot = i * STEP + threadIdx.x / WIDTH;
      const bool inside = quad < walk.length();
      const size_t row = walk.first_row() + quad;
      UNROLL for (int32_t t = 0; t < TOKENS; t++) {
        float4 four = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        if (inside && t < tokens) four = load4(x + static_cast<size_t>(t) * all.rows + row);
        others |= !fits(four.x) || !fits(four.y) || !fits(four.z) || !fits(four.w);
        const int32_t at = (t * slots + slot) * STRIDE;
        const float sum = group_sum((four.x + four.y) + (four.z + four.w), all.pieces_of_group);
        if (quad % Code<BITS>::PIECE == 0) held.set(at + SEGMENT + quad / Code<BITS>::PIECE, sum);
        held.set4(at + quad, make_float4(four.x * factors[0], four.y * factors[1], four.z * factors[2],
                                         four.w * factors[3]));
      }
    }
    return !__syncthreads_or(others);
  }

 private:
  static __device__ bool fits(float number) {
    const uint32_t magnitude = __float_as_uint(number) & 0x7fffffffu;
    return magnitude - LEAST < RANGE || magnitude == 0;
  }

  // Over the threads that hold a group's rows of a segment.
  static __device__ float group_sum(float value, int32_t pieces) {
    constexpr int32_t OF_PIECE = Code<BITS>::PIECE / 4;
    value = sum_of_lanes<OF_PIECE>(value);
    UNROLL for (int32_t distance = 1; distance < Code<BITS>::PIECES; distance *= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, value, distance * OF_PIECE);
      if (distance < pieces) value += other;
    }
    return value;
  }
};

// **Sums** of activations times codes, for four columns of each token.
template <int TOKENS>
struct Sums {
  float of[TOKENS][4];

  __device__ void clear() {
    UNROLL for (int32_t t = 0; t < TOKENS; t++) {
      UNROLL for (int32_t c = 0; c < 4; c++) of[t][c] = 0.0f;
    }
  }

  // Add a piece.
  template <int BITS, bool FAST>
  __device__ void multiply(const Words<Code<BITS>::PIECE_WORDS>& words, const Activations<BITS, TOKENS>& x, int32_t slot,
                           int32_t piece) {
    uint32_t column[4][Code<BITS>::PIECE_WORDS];
    UNROLL for (int32_t c = 0; c < 4; c++) words.column(c, column[c]);
    UNROLL for (int32_t i = 0; i < Code<BITS>::PIECE; i += 4) {
      float codes[4][4];
      UNROLL for (int32_t c = 0; c < 4; c++) {
        UNROLL for (int32_t j = 0; j < 4; j++) codes[j][c] = Code<BITS>::template value<FAST>(column[c], i + j);
      }
      UNROLL for (int32_t t = 0; t < TOKENS; t++) {
        if (t == TOKENS / 2 && t > 0 && t >= x.tokens) break;
        const float4 four = x.get4(t, slot, piece * Code<BITS>::PIECE + i);
        UNROLL for (int32_t c = 0; c < 4; c++) {
          of[t][c] = fmaf(four.x, codes[0][c], of[t][c]);
          of[t][c] = fmaf(four.y, codes[1][c], of[t][c]);
          of[t][c] = fmaf(four.z, codes[2][c], of[t][c]);
          of[t][c] = fmaf(four.w, codes[3][c], of[t][c]);
        }
      }
    }
  }

  // A group ends: its sums are scaled and added to those of the columns, as s (sum - z X) or s sum + z X, where X is
  // the sum of the activations. The next begins with nothing.
  template <bool FAST, int BITS, class Scale>
  __device__ void finish(Sums& y, const Scales<Scale>& stored, bool zero_point, const Activations<BITS, TOKENS>& x,
                         int32_t slot, int32_t piece) {
    const float4 scale = as_floats(stored.scales), zero = as_floats(stored.zeros);
    const float s[4] = {scale.x, scale.y, scale.z, scale.w}, z[4] = {zero.x, zero.y, zero.z, zero.w};
    UNROLL for (int32_t t = 0; t < TOKENS; t++) {
      const float total = x.sum(t, slot, piece);
      UNROLL for (int32_t c = 0; c < 4; c++) {
        const float sum = FAST ? of[t][c] * DESCALED : of[t][c], before = y.of[t][c];
        y.of[t][c] = zero_point ? fmaf(s[c], fmaf(-z[c], total, sum), before) : fmaf(s[c], sum, fmaf(z[c], total, before));
      }
    }
    clear();
  }
};

// **One token**, whole segments. Words of the next segment are on their way while those of this one are multiplied: as
// soon as a word has been used, its place is filled. So is that of a scale. With several matrices, a segment of each is
// taken in turn.
template <int BITS, class Scale>
struct Fetched {
  Words<Code<BITS>::PIECE_WORDS> words[Code<BITS>::PIECES];
  Scales<Scale> scales;  // of the group that ends next

  __device__ void load(int32_t piece, const uint32_t* segment) {
    words[piece].load(segment + piece * Code<BITS>::PIECE_WORDS * PANEL);
  }
};

template <int BITS, int PIECES_OF_GROUP, class Scale, int MATRICES>
__device__ inline void fast_rounds(Sums<1> (&y)[MATRICES], const Matrix<BITS, Scale> (&matrices)[MATRICES],
                                   Walk<BITS>& walk, int32_t left, Fetched<BITS, Scale>& fetched,
                                   const Activations<BITS, 1>& x, int32_t& slot, bool zero_point) {
  constexpr int32_t PIECES = Code<BITS>::PIECES;
  const uint32_t* words[MATRICES];
  UNROLL for (int32_t m = 0; m < MATRICES; m++) words[m] = matrices[m].at(walk.first_row());
  ROLLED for (; left > 0; left--, slot += SLICES) {
    int32_t group = walk.first_group();
    UNROLL for (int32_t m = 0; m < MATRICES; m++) {
      const bool last = m + 1 == MATRICES, more = !last || left > 1;
      const uint32_t* segment = last ? words[0] + SLICES * Code<BITS>::WORDS * PANEL : words[m + 1];
      Sums<1> sums;
      sums.clear();
      UNROLL for (int32_t piece = 0; piece < PIECES; piece++) {
        sums.template multiply<BITS, true>(fetched.words[piece], x, slot, piece);
        if (more) fetched.load(piece, segment);
        if ((piece + 1) % PIECES_OF_GROUP == 0) {
          sums.template finish<true>(y[m], fetched.scales, zero_point, x, slot, piece);
          if (piece + 1 < PIECES) {
            fetched.scales.load(matrices[m], group + (piece + 1) / PIECES_OF_GROUP);
          } else if (more) {
            if (last) walk.advance();
            fetched.scales.load(matrices[last ? 0 : m + 1], walk.first_group());
          }
        }
      }
    }
    UNROLL for (int32_t m = 0; m < MATRICES; m++) words[m] += SLICES * Code<BITS>::WORDS * PANEL;
  }
}

// **Any number of tokens**, and activations of any size.
template <int BITS, bool FAST, class Scale, int TOKENS>
__device__ inline void piece_rounds(Sums<TOKENS>& y, const Matrix<BITS, Scale>& matrix, Walk<BITS> walk, int32_t left,
                                    const Activations<BITS, TOKENS>& x, int32_t slot, bool zero_point) {
  constexpr int32_t COUNT = Code<BITS>::PIECE_WORDS;
  for (; left > 0; left--, walk.advance(), slot += SLICES) {
    const uint32_t* words = matrix.at(walk.first_row());
    const int32_t there = walk.length() * BITS / 32;
    Words<COUNT> now, next;
    Scales<Scale> scales;
    now.clear();
    next.clear();
    scales.clear();
    now.load(words, there);
    Sums<TOKENS> sums;
    sums.clear();
    ROLLED for (int32_t piece = 0; piece < Code<BITS>::PIECES; piece++) {
      const int32_t done = (piece + 1) * COUNT;
      if (piece + 1 < Code<BITS>::PIECES) next.load(words + done * PANEL, there - done);
      const bool ends = walk.all.ends_group(piece);
      const int32_t group = walk.all.group_of(piece);
      if (ends && group < walk.groups()) scales.load(matrix, walk.first_group() + group);
      sums.template multiply<BITS, FAST>(now, x, slot, piece);
      if (ends) sums.template finish<FAST>(y, scales, zero_point, x, slot, piece);
      now = next;
    }
  }
}

// **A block's product**: for each of the matrices, the sums of this thread's slice.
template <int BITS, class Scale, int TOKENS, int MATRICES>
__device__ inline void product(Sums<TOKENS> (&y)[MATRICES], const Matrix<BITS, Scale> (&matrices)[MATRICES],
                               Activations<BITS, TOKENS> x, const Segments<BITS>& all, bool zero_point) {
  constexpr int32_t MOST = Activations<BITS, TOKENS>::MOST;
  UNROLL for (int32_t m = 0; m < MATRICES; m++) y[m].clear();
  ROLLED for (int32_t base = 0; base < all.count; base += MOST) {
    int32_t slot = threadIdx.x / 8;
    const int32_t segments = all.count - base < MOST ? all.count - base : MOST;
    int32_t rounds = (segments - slot + SLICES - 1) / SLICES;  // of this slice
    x.slots = (segments + SLICES - 1) / SLICES * SLICES;
    Walk<BITS> walk(all, base + slot, SLICES);
    if (base > 0) __syncthreads();
    bool fast = false;
    if constexpr (TOKENS == 1) {
      Fetched<BITS, Scale> fetched;
      const int32_t beyond = base + slot + rounds * SLICES;  // the next segment of this slice, if there were one
      const int32_t whole = !all.regular() ? 0 : all.rows / Code<BITS>::SEGMENT > beyond - SLICES ? rounds : rounds - 1;
      if (whole > 0) {
        UNROLL for (int32_t i = 0; i < Code<BITS>::PIECES; i++) fetched.load(i, matrices[0].at(walk.first_row()));
        fetched.scales.load(matrices[0], walk.first_group());
      }
      fast = x.stage(all, base, true);
      if (fast && whole > 0) {
        rounds -= whole;
        constexpr int32_t PIECES = Code<BITS>::PIECES;
        if (all.pieces_of_group == PIECES) {
          fast_rounds<BITS, PIECES>(y, matrices, walk, whole, fetched, x, slot, zero_point);
        } else if (all.pieces_of_group == PIECES / 2) {
          fast_rounds<BITS, PIECES / 2>(y, matrices, walk, whole, fetched, x, slot, zero_point);
        } else if constexpr (PIECES == 4) {
          fast_rounds<BITS, 1>(y, matrices, walk, whole, fetched, x, slot, zero_point);
        }
      }
    } else {
      fast = x.stage(all, base, true);
    }
    if (!fast) x.stage(all, base, false);
    UNROLL for (int32_t m = 0; m < MATRICES; m++) {
      if (fast) {
        piece_rounds<BITS, true>(y[m], matrices[m], walk, rounds, x, slot, zero_point);
      } else {
        piece_rounds<BITS, false>(y[m], matrices[m], walk, rounds, x, slot, zero_point);
      }
    }
  }
}

// **The sum over slices.** Thread i has the sums of token i / 32 and column i mod 32, if the block has so many tokens.
template <int TOKENS, int MATRICES>
__device__ inline void add_slices(float (&result)[MATRICES], const Sums<TOKENS> (&y)[MATRICES]) {
  const Shared<float> parts(0);
  const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  __syncthreads();
  UNROLL for (int32_t m = 0; m < MATRICES; m++) {
    UNROLL for (int32_t t = 0; t < TOKENS; t++) {
      float sums[4];
      UNROLL for (int32_t c = 0; c < 4; c++) {
        sums[c] = y[m].of[t][c];
        sums[c] += __shfl_xor_sync(ALL_LANES, sums[c], 16);
        sums[c] += __shfl_xor_sync(ALL_LANES, sums[c], 8);
      }
      if (lane < 8) {
        parts.set4(((warp * MATRICES + m) * TOKENS + t) * PANEL + lane * 4,
                   make_float4(sums[0], sums[1], sums[2], sums[3]));
      }
    }
  }
  __syncthreads();
  UNROLL for (int32_t m = 0; m < MATRICES; m++) {
    result[m] = 0.0f;
    if (warp < TOKENS) {
      UNROLL for (int32_t w = 0; w < WARPS; w++) {
        result[m] += parts.get(((w * MATRICES + m) * TOKENS + warp) * PANEL + lane);
      }
    }
  }
}

template <int TOKENS>
__device__ inline void store(float* y, float result, int32_t tokens, int32_t columns) {
  const int32_t token = blockIdx.y * TOKENS + threadIdx.x / 32, column = blockIdx.x * PANEL + threadIdx.x % 32;
  if (threadIdx.x / 32 < TOKENS && token < tokens && column < columns) {
    y[static_cast<size_t>(token) * columns + column] = result;
  }
}

// **The kernels.**

template <int BITS, class Scale, int TOKENS>
__device__ inline void gemm(float* y, const float* x, const uint32_t* words, const Scale* scales, const Scale* zeros,
                            int32_t tokens, int32_t rows, int32_t columns, int32_t group_size, int32_t zero_point) {
  const Segments<BITS> all(rows, group_size);
  const Matrix<BITS, Scale> matrices[1] = {{words, scales, zeros, rows, group_size}};
  Sums<TOKENS> sums[1];
  float result[1];
  product(sums, matrices, Activations<BITS, TOKENS>(x, tokens, rows), all, zero_point != 0);
  add_slices(result, sums);
  store<TOKENS>(y, result[0], tokens, columns);
}

// silu(x W_gate) (x W_up). For one token both matrices are read side by side; for more, one after the other.
template <int BITS, class Scale, int TOKENS>
__device__ inline void expert_in(float* y, const float* x, const uint32_t* gate_words, const Scale* gate_scales,
                                 const Scale* gate_zeros, const uint32_t* up_words, const Scale* up_scales,
                                 const Scale* up_zeros, int32_t tokens, int32_t rows, int32_t columns,
                                 int32_t group_size, int32_t zero_point) {
  const Segments<BITS> all(rows, group_size);
  const Activations<BITS, TOKENS> from(x, tokens, rows);
  if constexpr (TOKENS == 1) {
    const Matrix<BITS, Scale> matrices[2] = {{gate_words, gate_scales, gate_zeros, rows, group_size},
                                             {up_words, up_scales, up_zeros, rows, group_size}};
    Sums<1> sums[2];
    float result[2];
    product(sums, matrices, from, all, zero_point != 0);
    add_slices(result, sums);
    store<TOKENS>(y, silu(result[0]) * result[1], tokens, columns);
  } else {
    float results[2][1];
    ROLLED for (int32_t m = 0; m < 2; m++) {
      const Matrix<BITS, Scale> matrices[1] = {
          {m == 0 ? gate_words : up_words, m == 0 ? gate_scales : up_scales, m == 0 ? gate_zeros : up_zeros, rows, group_size}};
      Sums<TOKENS> sums[1];
      product(sums, matrices, from, all, zero_point != 0);
      results[0][0] = results[1][0];
      add_slices(results[1], sums);
      __syncthreads();
    }
    store<TOKENS>(y, silu(results[0][0]) * results[1][0], tokens, columns);
  }
}

// The weights: a thread takes one column of a unit of words, and of the next ones of its panel.
template <int BITS, class Scale>
__device__ inline void dequantize(float* y, const uint32_t* words, const Scale* scales, const Scale* zeros,
                                  int32_t rows, int32_t columns, int32_t group_size, int32_t zero_point) {
  constexpr int32_t UNIT = BITS == 3 ? 32 : 32 / BITS, COUNT = UNIT * BITS / 32;
  const size_t panel = blockIdx.x * PANEL, groups = (rows + group_size - 1) / group_size;
  const int32_t lane = threadIdx.x % 32, column = blockIdx.x * PANEL + lane;
  if (column >= columns) return;
  for (int32_t i = threadIdx.x / 32; i < SLICES; i += WARPS) {
    const int32_t unit = blockIdx.y * SLICES + i, row = unit * UNIT;
    if (row >= rows) return;
    uint32_t of[COUNT];
    UNROLL for (int32_t u = 0; u < COUNT; u++) {
      of[u] = words[panel * (rows * BITS / 32) + static_cast<size_t>(unit * COUNT + u) * PANEL + lane];
    }
    const size_t at = (panel * groups) + static_cast<size_t>(row / group_size) * PANEL + lane;
    const float scale = load1(scales + at), zero = load1(zeros + at);
    UNROLL for (int32_t k = 0; k < UNIT; k++) {
      const float code = Code<BITS>::template value<false>(of, k);
      const float weight = zero_point ? scale * (code - zero) : scale * code + zero;
      y[static_cast<size_t>(row + k) * columns + column] = weight;
    }
  }
}

#define LOWBIT_PRODUCT(BITS, SCALE, TYPE, TOKENS, BLOCKS)                                                              \
  KERNEL(THREADS, BLOCKS)                                                                                              \
  gemm_b##BITS##_##SCALE##_t##TOKENS(float* y, const float* x, const uint32_t* words, const TYPE* scales,              \
                                     const TYPE* zeros, int32_t tokens, int32_t rows, int32_t columns,                 \
                                     int32_t group_size, int32_t zero_point) {                                         \
    gemm<BITS, TYPE, TOKENS>(y, x, words, scales, zeros, tokens, rows, columns, group_size, zero_point);               \
  }                                                                                                                    \
  KERNEL(THREADS, BLOCKS)                                                                                              \
  expert_in_b##BITS##_##SCALE##_t##TOKENS(                                                                             \
      float* y, const float* x, const uint32_t* gate_words, const TYPE* gate_scales, const TYPE* gate_zeros,           \
      const uint32_t* up_words, const TYPE* up_scales, const TYPE* up_zeros, int32_t tokens, int32_t rows,             \
      int32_t columns, int32_t group_size, int32_t zero_point) {                                                       \
    expert_in<BITS, TYPE, TOKENS>(y, x, gate_words, gate_scales, gate_zeros, up_words, up_scales, up_zeros, tokens,    \
                                  rows, columns, group_size, zero_point);                                              \
  }

#define LOWBIT_DEQUANTIZE(BITS, SCALE, TYPE)                                                                           \
  KERNEL(THREADS, 1)                                                                                                   \
  dequantize_b##BITS##_##SCALE(float* y, const uint32_t* words, const TYPE* scales, const TYPE* zeros, int32_t rows,   \
                               int32_t columns, int32_t group_size, int32_t zero_point) {                              \
    dequantize<BITS, TYPE>(y, words, scales, zeros, rows, columns, group_size, zero_point);                            \
  }

#define LOWBIT_LINEAR(BITS, SCALE, TYPE)    \
  LOWBIT_PRODUCT(BITS, SCALE, TYPE, 1, 2)   \
  LOWBIT_PRODUCT(BITS, SCALE, TYPE, 8, 1)   \
  LOWBIT_DEQUANTIZE(BITS, SCALE, TYPE)
