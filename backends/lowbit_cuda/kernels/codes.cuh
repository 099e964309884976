// How a block reads quantised matrices: codes of b bits, and the segments of rows that its threads process.
#pragma once

#include "numbers.cuh"

constexpr int32_t THREADS = 256, WARPS = THREADS / 32, PANEL = 32, SLICES = 32;

// **Codes of b bits**, extracted from the words of one column; code 0 begins the first word.
template <int BITS>
struct Code {
  static constexpr uint32_t MASK = (1u << BITS) - 1u;
  // The rows that a thread processes at once, and the pieces that they are divided into: each fills whole words.
  static constexpr int32_t SEGMENT = BITS == 8 ? 32 : 64, PIECE = BITS == 3 ? 32 : 16, PIECES = SEGMENT / PIECE;
  static constexpr int32_t PIECE_WORDS = PIECE * BITS / 32, WORDS = SEGMENT * BITS / 32;

  // The position of a code's first bit in the word that it begins in, and then in the word that `window` returns.
  static __device__ constexpr int32_t bit(int32_t i) { return BITS * (i % (32 / BITS)); }
  static __device__ constexpr int32_t place(int32_t i) {
    return BITS == 3 ? 3 * (i % 8) : bit(i) + BITS <= 24 ? bit(i) : bit(i) - 8;
  }

  // 32 bits that hold code i at its place, entirely below bit 24.
  template <int COUNT>
  static __device__ uint32_t window(const uint32_t (&words)[COUNT], int32_t i) {
    if constexpr (BITS == 3) {
      const int32_t quarter = i / 8;
      return quarter == 0   ? words[0]
             : quarter == 1 ? __funnelshift_r(words[0], words[1], 24)
             : quarter == 2 ? __funnelshift_r(words[1], words[2], 16)
                            : words[2] >> 8;
    } else {
      const uint32_t word = words[i * BITS / 32];
      return bit(i) == place(i) ? word : word >> 8;
    }
  }

  // The code q as a float; or, with AS_IT_IS, the float whose bits these are: q 2^(place - 149).
  template <bool AS_IT_IS, int COUNT>
  static __device__ float value(const uint32_t (&words)[COUNT], int32_t i) {
    const uint32_t word = window(words, i);
    if constexpr (AS_IT_IS) return __uint_as_float(word & MASK << place(i));
    return __uint_as_float(0x4b000000u | (word >> place(i) & MASK)) - 8388608.0f;  // the low bits of 2^23 + q are q
  }
};

// **Segments** divide runs of rows; no segment crosses the end of a run, and the last one of a run may be short.
// Usually a run is a group. Where several groups fill a segment exactly, the run is the whole column, and groups end
// within segments.
template <int BITS>
struct Segments {
  static constexpr int32_t SEGMENT = Code<BITS>::SEGMENT, PIECE = Code<BITS>::PIECE;
  int32_t rows, run, of_run, count;
  int32_t groups_in;        // how many groups a segment holds if there are several, else 0
  int32_t pieces_of_group;  // the pieces of a segment if it holds one group; a power of two

  __device__ Segments(int32_t all_rows, int32_t group_size) : rows(all_rows), run(group_size) {
    const bool several = group_size < SEGMENT && SEGMENT % group_size == 0 && group_size % PIECE == 0;
    groups_in = several ? SEGMENT / group_size : 0;
    pieces_of_group = several ? group_size / PIECE : Code<BITS>::PIECES;  // 1 or 2 if there are several groups
    if (several) run = rows;
    of_run = (run + SEGMENT - 1) / SEGMENT;
    count = rows / run * of_run + (rows % run + SEGMENT - 1) / SEGMENT;
  }

  // Whether every segment is whole.
  __device__ bool whole() const { return rows % SEGMENT == 0 && run % SEGMENT == 0; }

  __device__ bool ends_group(int32_t piece) const { return ((piece + 1) & (pieces_of_group - 1)) == 0; }

  // The index, within its segment, of the group that a piece belongs to.
  __device__ int32_t group_of(int32_t piece) const { return groups_in > 0 ? piece >> (pieces_of_group - 1) : 0; }
};

// Walks from a segment to the next one at a fixed distance, without a division for each step.
template <int BITS>
struct Walk {
  static constexpr int32_t SEGMENT = Code<BITS>::SEGMENT;
  const Segments<BITS>& all;
  int32_t run, part, runs_on, parts_on;

  __device__ Walk(const Segments<BITS>& segments, int32_t first, int32_t step)
      : all(segments), run(first / segments.of_run), runs_on(step / segments.of_run) {
    part = first - run * all.of_run;
    parts_on = step - runs_on * all.of_run;
  }

  __device__ void advance() {
    run += runs_on;
    part += parts_on;
    if (part >= all.of_run) {
      part -= all.of_run;
      run++;
    }
  }

  __device__ int32_t first_row() const { return run * all.run + part * SEGMENT; }

  // The number of rows; 0 past the last segment.
  __device__ int32_t length() const {
    const int32_t run_end = (run + 1) * all.run, end = run_end < all.rows ? run_end : all.rows;
    const int32_t left = end - first_row();
    return left > SEGMENT ? SEGMENT : left > 0 ? left : 0;
  }

  // The group of the segment's first row, and the number of groups that it has rows of.
  __device__ int32_t first_group() const { return run + part * all.groups_in; }
  __device__ int32_t groups() const {
    const int32_t rows = all.pieces_of_group * Code<BITS>::PIECE;
    return (length() + rows - 1) / rows;
  }
};

// **A matrix** as the kernel receives it, and the places in it at which a thread's four columns of the block's panel
// begin. They are the same for all matrices of a launch; no matrix has more than 2^31 words or scales.
template <int BITS, class Scale>
struct Matrix {
  const uint32_t* words;
  const Scale *scales, *zeros;
};

template <int BITS>
struct Columns {
  uint32_t words, scales;

  __device__ Columns(int32_t rows, int32_t group_size) {
    const uint32_t panel = blockIdx.x * PANEL, column = threadIdx.x % 8 * 4;
    words = panel * (rows * BITS / 32) + column;
    scales = panel * ((rows + group_size - 1) / group_size) + column;
  }

  // The word in which a row's code begins.
  __device__ uint32_t word(int32_t row) const { return words + row * BITS / 32 * PANEL; }
};

// Words of four columns; `column` selects those of one column.
template <int COUNT>
struct Words {
  uint4 rows[COUNT];

  __device__ void clear() {
    UNROLL for (int32_t i = 0; i < COUNT; i++) rows[i] = make_uint4(0, 0, 0, 0);
  }

  __device__ void load(const uint32_t* from) {
    UNROLL for (int32_t i = 0; i < COUNT; i++) rows[i] = load_words(from + i * PANEL);
  }

  // Load only the first `there` rows. The other rows keep their old words, which are multiplied by zeros.
  __device__ void load(const uint32_t* from, int32_t there) {
    UNROLL for (int32_t i = 0; i < COUNT; i++) {
      if (i < there) rows[i] = load_words(from + i * PANEL);
    }
  }

  __device__ void column(int32_t c, uint32_t (&of)[COUNT]) const {
    UNROLL for (int32_t i = 0; i < COUNT; i++) {
      of[i] = c == 0 ? rows[i].x : c == 1 ? rows[i].y : c == 2 ? rows[i].z : rows[i].w;
    }
  }
};

// One scale and one zero for each of four columns, as they are stored.
template <class Scale>
struct Scales {
  typename Four<Scale>::type scales, zeros;

  __device__ void clear() { scales = zeros = typename Four<Scale>::type{}; }

  template <int BITS>
  __device__ void load(const Matrix<BITS, Scale>& matrix, const Columns<BITS>& columns, int32_t group) {
    const uint32_t at = columns.scales + group * PANEL;
    scales = *reinterpret_cast<const typename Four<Scale>::type*>(matrix.scales + at);
    zeros = *reinterpret_cast<const typename Four<Scale>::type*>(matrix.zeros + at);
  }
};
