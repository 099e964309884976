// Products with quantised matrices: Y = X W for a few tokens, each weight read once.
//
// **Division of the work.** Each block computes a panel of 32 columns, and each thread four columns over a part of the
// rows. Eight neighbouring threads cover the panel, and together read 128 bytes of a row of words. The rows are divided
// into segments of up to 64 rows (32 for 8 bits), which are assigned in turn to 32 slices of eight threads each. At the
// end the sums of the slices are added: those of the four slices of a warp by shuffles, then those of the eight warps
// one after the other. So for given rows and groups, the order in which a column is summed is always the same. It
// depends on neither N nor the number of tokens, nor on which of the two methods below is used.
//
// **Activations** are kept in shared memory, one slot for each segment. A slot holds the factors themselves, zeros up
// to the full length where a segment is short, and the sums over groups, which every column needs for its zeros.
//
// **The product of an activation and a code** costs two instructions. A word in which all bits but those of one code
// are cleared is itself a float: a code q at bit p, p at most 24 - b, is q 2^(p - 149). It is subnormal or just above,
// and can be multiplied like any other float. To make up for the power of two, the activation is multiplied by
// 2^(75 - p) when it is copied to shared memory. The result is x q 2^-74: one LOP3 and one FFMA per code, and a shift
// for codes above bit 24.
//
// Every rounding is the same as without scaling where each |x| is 0 or in [2^-52, 2^53): nothing overflows, and
// x q 2^-74 and all sums of such products are multiples of 2^-149, which subnormal numbers hold exactly. A block that
// finds any other x stores its activations unscaled and converts codes to floats first, which costs two more
// instructions per code. Both methods give the same bits; NaN and infinities take the second one.
//
// **Instructions**, counted in the machine code that NVRTC 13.5 makes for sm_90 of the loop over whole segments, for
// one token and float16 scales. Each iteration loads its words once, 16 bytes per instruction.
//
//   bits  codes         loads of words  instructions for groups of 16, 32, or 64 and more   per code
//   2     256           4               707, 640, 607                                       2.8, 2.5, 2.4
//   3     256           6               -, 648, 616                                         -, 2.5, 2.4
//   4     256           8               727, 660, 627                                       2.9, 2.6, 2.4
//   8     128           8               410, 362, 362                                       3.2, 2.8, 2.8
//
// The columns are per iteration. The 627 at 4 bits are 272 FFMA, 256 LOP3, 32 shifts, 16 LDS.128, and 51 others, of
// which 8 are the LDG.E.128 of words.
#pragma once

#include "activations.cuh"

// **Sums** of activations times codes, for four columns of each token.
template <int TOKENS>
struct Sums {
  float of[TOKENS][4];

  __device__ void clear() {
    UNROLL for (int32_t t = 0; t < TOKENS; t++) {
      UNROLL for (int32_t c = 0; c < 4; c++) of[t][c] = 0.0f;
    }
  }

  // Add the products of one piece.
  template <int BITS, bool FAST>
  __device__ void multiply(const Words<Code<BITS>::PIECE_WORDS>& words, const Activations<BITS, TOKENS>& x,
                           int32_t slot, int32_t piece) {
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

  // At the end of a group, add its scaled sums to those of the columns, as s (sum - z X) or s sum + z X, where X is the
  // sum of the activations; then clear them for the next group.
  template <bool FAST, int BITS, class Scale>
  __device__ void finish(Sums& y, const Scales<Scale>& stored, int32_t zero_point, const Activations<BITS, TOKENS>& x,
                         int32_t slot, int32_t piece) {
    const float4 scale = as_floats(stored.scales), zero = as_floats(stored.zeros);
    const bool codes = opaque(zero_point) != 0;
    const float s[4] = {scale.x, scale.y, scale.z, scale.w}, z[4] = {zero.x, zero.y, zero.z, zero.w};
    UNROLL for (int32_t t = 0; t < TOKENS; t++) {
      const float total = x.sum(t, slot, piece);
      UNROLL for (int32_t c = 0; c < 4; c++) {
        const float sum = FAST ? of[t][c] * DESCALED : of[t][c], before = y.of[t][c];
        y.of[t][c] =
            codes ? fmaf(s[c], fmaf(-z[c], total, sum), before) : fmaf(s[c], sum, fmaf(z[c], total, before));
      }
    }
    clear();
  }
};

// Move the sums of the next matrix to index 0: a loop cannot index an array that is held in registers.
template <int TOKENS>
__device__ inline void turn(Sums<TOKENS> (&y)[2]) {
  const Sums<TOKENS> first = y[0];
  y[0] = y[1];
  y[1] = first;
}

template <int TOKENS>
__device__ inline void turn(Sums<TOKENS> (&)[1]) {}

// **One token**, whole segments. The words of the next segment are loaded while those of this one are multiplied: each
// word, once used, is replaced by the load of the next. The same holds for scales. With several matrices, the loop
// takes a segment of each in turn.
template <int BITS, class Scale>
struct Fetched {
  Words<Code<BITS>::PIECE_WORDS> words[Code<BITS>::PIECES];
  Scales<Scale> scales;  // of the next group to end

  __device__ void load(int32_t piece, const uint32_t* segment) {
    words[piece].load(segment + piece * Code<BITS>::PIECE_WORDS * PANEL);
  }
};

template <int BITS, int PIECES_OF_GROUP, class Scale, int MATRICES>
__device__ inline void fast_rounds(Sums<1> (&y)[MATRICES], const Matrix<BITS, Scale> (&matrices)[MATRICES],
                                   const Columns<BITS>& columns, Walk<BITS> walk, int32_t left,
                                   Fetched<BITS, Scale>& fetched, const Activations<BITS, 1>& x, int32_t slot,
                                   int32_t zero_point) {
  constexpr int32_t PIECES = Code<BITS>::PIECES;
  uint32_t words = columns.word(walk.first_row());
  int32_t group = walk.first_group();
  ROLLED for (int32_t m = 0; left > 0;) {  // m is the index of the matrix; y[0] always holds its sums
    const Matrix<BITS, Scale> matrix = m == 0 ? matrices[0] : matrices[MATRICES - 1];
    m = (m + 1) % MATRICES;
    const Matrix<BITS, Scale> following = m == 0 ? matrices[0] : matrices[MATRICES - 1];
    if (m == 0) {
      words += SLICES * Code<BITS>::WORDS * PANEL;
      walk.advance();
      left--;
    }
    Sums<1> sums;
    sums.clear();
    UNROLL for (int32_t piece = 0; piece < PIECES; piece++) {
      sums.template multiply<BITS, true>(fetched.words[piece], x, slot, piece);
      if (left > 0) fetched.load(piece, following.words + words);
      if ((piece + 1) % PIECES_OF_GROUP == 0) {
        sums.template finish<true>(y[0], fetched.scales, zero_point, x, slot, piece);
        if (piece + 1 < PIECES) {
          fetched.scales.load(matrix, columns, group + (piece + 1) / PIECES_OF_GROUP);
        } else if (left > 0) {
          group = walk.first_group();
          fetched.scales.load(following, columns, group);
        }
      }
    }
    if (m == 0) slot += SLICES;
    turn(y);
  }
}

// **Any number of tokens**, and activations of any magnitude.
template <int BITS, bool FAST, class Scale, int TOKENS>
__device__ inline void piece_rounds(Sums<TOKENS>& y, const Matrix<BITS, Scale>& matrix, const Columns<BITS>& columns,
                                    Walk<BITS> walk, int32_t left, const Activations<BITS, TOKENS>& x, int32_t slot,
                                    int32_t zero_point) {
  constexpr int32_t COUNT = Code<BITS>::PIECE_WORDS;
  for (; left > 0; left--, walk.advance(), slot += SLICES) {
    const uint32_t* words = matrix.words + columns.word(walk.first_row());
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
      if (ends && group < walk.groups()) scales.load(matrix, columns, walk.first_group() + group);
      sums.template multiply<BITS, FAST>(now, x, slot, piece);
      if (ends) sums.template finish<FAST>(y, scales, zero_point, x, slot, piece);
      now = next;
    }
  }
}

// **A block's product**: for each matrix, the sums of this thread's slice. What depends only on the shape is computed
// again for each part of the column that fits into shared memory: that is cheap, and keeping it would take registers.
template <int BITS, class Scale, int TOKENS, int MATRICES>
__device__ inline void product(Sums<TOKENS> (&y)[MATRICES], const Matrix<BITS, Scale> (&matrices)[MATRICES],
                               Activations<BITS, TOKENS> x, int32_t rows, int32_t group_size, int32_t zero_point) {
  constexpr int32_t MOST = Activations<BITS, TOKENS>::MOST;
  UNROLL for (int32_t m = 0; m < MATRICES; m++) y[m].clear();
  bool more = true;
  ROLLED for (int32_t base = 0; more; base += MOST) {
    const Segments<BITS> all(rows, opaque(group_size));
    const Columns<BITS> columns(rows, opaque(group_size));
    more = all.count - base > MOST;
    const int32_t slot = threadIdx.x / 8;
    const int32_t segments = more ? MOST : all.count - base;
    const int32_t rounds = (segments - slot + SLICES - 1) / SLICES;  // for this slice
    x.slots = (segments + SLICES - 1) / SLICES * SLICES;
    const Walk<BITS> walk(all, base + slot, SLICES);
    if (base > 0) __syncthreads();
    bool fast = false;
    if constexpr (TOKENS == 1) {
      Fetched<BITS, Scale> fetched;
      if (all.whole() && rounds > 0) {
        const uint32_t* segment = matrices[0].words + columns.word(walk.first_row());
        UNROLL for (int32_t i = 0; i < Code<BITS>::PIECES; i++) fetched.load(i, segment);
        fetched.scales.load(matrices[0], columns, walk.first_group());
      }
      fast = x.stage(all, base, true);
      if (fast && all.whole()) {
        constexpr int32_t PIECES = Code<BITS>::PIECES;
        if (all.pieces_of_group == PIECES) {
          fast_rounds<BITS, PIECES>(y, matrices, columns, walk, rounds, fetched, x, slot, zero_point);
        } else if (all.pieces_of_group == PIECES / 2) {
          fast_rounds<BITS, PIECES / 2>(y, matrices, columns, walk, rounds, fetched, x, slot, zero_point);
        } else if constexpr (PIECES == 4) {
          fast_rounds<BITS, 1>(y, matrices, columns, walk, rounds, fetched, x, slot, zero_point);
        }
        continue;
      }
    } else {
      fast = x.stage(all, base, true);
    }
    if (!fast) x.stage(all, base, false);
    ROLLED for (int32_t m = 0; m < MATRICES; m++) {
      const Matrix<BITS, Scale> matrix = m == 0 ? matrices[0] : matrices[MATRICES - 1];
      if (fast) {
        piece_rounds<BITS, true>(y[0], matrix, columns, walk, rounds, x, slot, zero_point);
      } else {
        piece_rounds<BITS, false>(y[0], matrix, columns, walk, rounds, x, slot, zero_point);
      }
      turn(y);
    }
  }
}

// **The sum over slices.** Thread i gets the sums of token i / 32 and column i mod 32, if the block has that token.
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
  const Matrix<BITS, Scale> matrices[1] = {{words, scales, zeros}};
  Sums<TOKENS> sums[1];
  float result[1];
  product(sums, matrices, Activations<BITS, TOKENS>(x, tokens, rows), rows, group_size, zero_point);
  add_slices(result, sums);
  store<TOKENS>(y, result[0], tokens, columns);
}

// silu(x W_gate) (x W_up). For one token both matrices are read in the same loop; for more, one after the other.
template <int BITS, class Scale, int TOKENS>
__device__ inline void expert_in(float* y, const float* x, const uint32_t* gate_words, const Scale* gate_scales,
                                 const Scale* gate_zeros, const uint32_t* up_words, const Scale* up_scales,
                                 const Scale* up_zeros, int32_t tokens, int32_t rows, int32_t columns,
                                 int32_t group_size, int32_t zero_point) {
  const Activations<BITS, TOKENS> from(x, tokens, rows);
  if constexpr (TOKENS == 1) {
    const Matrix<BITS, Scale> matrices[2] = {{gate_words, gate_scales, gate_zeros},
                                             {up_words, up_scales, up_zeros}};
    Sums<1> sums[2];
    float result[2];
    product(sums, matrices, from, rows, group_size, zero_point);
    add_slices(result, sums);
    store<TOKENS>(y, silu(result[0]) * result[1], tokens, columns);
  } else {
    float gate = 0.0f, result[1] = {0.0f};
    ROLLED for (int32_t m = 0; m < 2; m++) {
      const Matrix<BITS, Scale> matrices[1] = {
          {m == 0 ? gate_words : up_words, m == 0 ? gate_scales : up_scales, m == 0 ? gate_zeros : up_zeros}};
      Sums<TOKENS> sums[1];
      product(sums, matrices, from, rows, group_size, zero_point);
      gate = result[0];
      add_slices(result, sums);
      __syncthreads();
    }
    store<TOKENS>(y, silu(gate) * result[0], tokens, columns);
  }
}

// The weights themselves: each thread converts one column of a unit of words, then that column of further units.
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

// Kernels for one token use half of a multiprocessor's registers, or all of them where `BLOCKS` is 1.
#define LOWBIT_LINEAR(BITS, SCALE, TYPE, BLOCKS) \
  LOWBIT_PRODUCT(BITS, SCALE, TYPE, 1, BLOCKS)   \
  LOWBIT_PRODUCT(BITS, SCALE, TYPE, 8, 1)        \
  LOWBIT_DEQUANTIZE(BITS, SCALE, TYPE)
