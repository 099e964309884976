// Quantised matrices as a block sees them: codes of b bits, and the segments of rows that its threads take.
#pragma once

#include "numbers.cuh"

constexpr int32_t THREADS = 256, WARPS = THREADS / 32, PANEL = 32, SLICES = 32;

// **Codes of b bits**, out of the words of one column; code 0 begins the first word.
template <int BITS>
struct Code {
  static constexpr uint32_t MASK = (1u << BITS) - 1u;
  // Rows that a thread takes at once, and in what parts: a part is whole words.
  static constexpr int32_t SEGMENT = BITS == 8 ? 32 : 64, PIECE = BITS == 3 ? 32 : 16, PIECES = SEGMENT / PIECE;
  static constexpr int32_t PIECE_WORDS = PIECE * BITS / 32, WORDS = SEGMENT * BITS / 32;

  // A code's first bit in the word that it begins in, and then in the word that `window` gives.
  static __device__ constexpr int32_t bit(int32_t i) { return BITS * (i % (32 / BITS)); }
  static __device__ constexpr int32_t place(int32_t i) {
    return BITS == 3 ? 3 * (i % 8) : bit(i) + BITS <= 24 ? bit(i) : bit(i) - 8;
  }

  // 32 bits with code i at its place, all of which is below bit 24.
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

  // q, or as the float that its bits are, q 2^(place - 149).
  template <bool AS_IT_IS, int COUNT>
  static __device__ float value(const uint32_t (&words)[COUNT], int32_t i) {
    const uint32_t word = window(words, i);
    if constexpr (AS_IT_IS) return __uint_as_float(word & MASK << place(i));
    return __uint_as_float(0x4b000000u | (word >> place(i) & MASK)) - 8388608.0f;  // 2^23 + q ends in q
  }
};

// **Segments** lie in runs of rows and do not reach beyond one; the last of a run may be short. A run is a group.
// Groups of which several fill a segment are taken together: then the run is the column, and a group ends within a
// segment.
template <int BITS>
struct Segments {
  static constexpr int32_t SEGMENT = Code<BITS>::SEGMENT, PIECE = Code<BITS>::PIECE;
  int32_t rows, run, of_run, count;
  int32_t groups_in;        // groups of a segment, if there are several, or 0
  int32_t pieces_of_group;  // those of a segment, if there is one: a power of two

  __device__ Segments(int32_t all_rows, int32_t group_size) : rows(all_rows), run(group_size) {
    const bool several = group_size < SEGMENT && SEGMENT % group_size == 0 && group_size % PIECE == 0;
    groups_in = several ? SEGMENT / group_size : 0;
    pieces_of_group = several ? group_size / PIECE : Code<BITS>::PIECES;  // several: 1 or 2
    if (several) run = rows;
    of_run = (run + SEGMENT - 1) / SEGMENT;
    count = rows / run * of_run + (rows % run + SEGMENT - 1) / SEGMENT;
  }

  // Whether every segment is whole.
  __device__ bool whole() const { return rows % SEGMENT == 0 && run % SEGMENT == 0; }

  __device__ bool ends_group(int32_t piece) const { return ((piece + 1) & (pieces_of_group - 1)) == 0; }

  // The how manieth of its segment a piece's group is.
  __device__ int32_t group_of(int32_t piece) const { return groups_in > 0 ? piece >> (pieces_of_group - 1) : 0; }
};

// A segment, and the way to those that follow at a fixed distance, without a division for each.
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

  // Rows; none, where it would come after the last.
  __device__ int32_t length() const {
    const int32_t run_end = (run + 1) * all.run, end = run_end < all.rows ? run_end : all.rows;
    const int32_t left = end - first_row();
    return left > SEGMENT ? SEGMENT : left > 0 ? left : 0;
  }

  // The group of its first row, and how many groups it has rows of.
  __device__ int32_t first_group() const { return run + part * all.groups_in; }
  __device__ int32_t groups() const {
    const int32_t rows = all.pieces_of_group * Code<BITS>::PIECE;
    return (length() + rows - 1) / rows;
  }
};

// **A matrix** as it is given, and where in it a thread's four columns of the block's panel begin. The latter is the
// same for all matrices of a launch, and none has more than 2^31 words or scales.
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

// Words of four columns, and those of one of them.
template <int COUNT>
struct Words {
  uint4 rows[COUNT];

  __device__ void clear() {
    UNROLL for (int32_t i = 0; i < COUNT; i++) rows[i] = make_uint4(0, 0, 0, 0);
  }

  __device__ void load(const uint32_t* from) {
    UNROLL for (int32_t i = 0; i < COUNT; i++) rows[i] = load_words(from + i * PANEL);
  }

  // Those that are there; of the others, the old ones stay, which are multiplied by zeros.
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

// A scale and a zero of each of four columns, as they are stored.
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
