// One call of a prepared matrix: lay out x, distribute the panels to the threads, write the columns that exist.
#pragma once

#include <cstdlib>
#include <memory>

#include "activations.h"
#include "pool.h"

namespace lowbit {

// A matrix of K rows and N columns in panels (panels.py).
struct Linear {
  Groups shape;
  std::int64_t columns, panel, panels, blocks;
  std::int64_t scales_each, zeros_each;  // scales and zeros in an element of the stream
  const std::uint32_t* stream;
  const std::int64_t* starts;  // the start of each block of each panel in the stream
  Pool* pool;
};

constexpr std::int64_t max_rows = 16;         // the largest Route::rows
constexpr std::int64_t max_panel = 128;       // the largest Linear::panel
constexpr std::int64_t usual_panel = 64;      // its default
constexpr std::int64_t rows_at_once = 64;     // rows of x laid out together, which bounds the memory of a call
constexpr std::int64_t own_rows = 32;         // likewise, if each thread has its own rows
constexpr std::int64_t chunk_work = 1 << 16;  // the fewest multiply-adds of a chunk
constexpr std::int64_t wake_work = 1 << 21;   // likewise, of a call that wakes sleeping threads (measured)
constexpr std::int64_t chunks_per_thread = 16;
constexpr std::int64_t cached_bytes = 1 << 18;  // laid-out activations that stay in a second-level cache

// The data that the threads of a call share.
struct Job {
  const Linear* linear;
  const Route* route;
  const float* x;  // laid out
  float* out;
  std::int64_t rows;
  std::int64_t first, last;  // blocks of every panel
};

// Copies some columns of a row. Most panels are whole, and a length that the compiler knows needs no call.
inline void copy_columns(float* to, const float* from, std::int64_t width) {
  if (width == usual_panel) std::memcpy(to, from, usual_panel * sizeof(float));
  else std::memcpy(to, from, width * sizeof(float));
}

// Fills a tile of results: with zeros before the first block, and with the sums so far before later blocks.
inline void begin_tile(const Job& job, std::int64_t row, std::int64_t column, std::int64_t width, float* tile) {
  const Linear& linear = *job.linear;
  std::memset(tile, 0, job.route->rows * linear.panel * sizeof(float));
  if (job.first == 0) return;
  for (std::int64_t r = 0; r < job.route->rows && row + r < job.rows; ++r)
    copy_columns(tile + r * linear.panel, job.out + (row + r) * linear.columns + column, width);
}

// The columns from .. to of a panel; `from` is a multiple of the columns that a kernel computes at once.
inline void compute_columns(const Job& job, std::int64_t number, std::int64_t from, std::int64_t to) {
  const Linear& linear = *job.linear;
  const Route& route = *job.route;
  const std::int64_t column = number * linear.panel + from, width = to - from;
  alignas(64) float tile[max_rows * max_panel];
  for (std::int64_t row = 0; row < job.rows; row += route.rows) {
    begin_tile(job, row, column, width, tile);
    for (std::int64_t block = job.first; block < job.last; ++block) {
      const std::uint32_t* const w = linear.stream + linear.starts[number * linear.blocks + block];
      const float* const x = job.x + row * route.x_length + route.x_starts[block] * route.rows;
      for (std::int64_t j = from; j < to; j += route.columns)
        route.call(w + j, w + j / linear.scales_each, w + j / linear.zeros_each, x, tile + j - from, route.sizes[block]);
    }
    for (std::int64_t r = 0; r < route.rows && row + r < job.rows; ++r)
      copy_columns(job.out + (row + r) * linear.columns + column, tile + r * linear.panel, width);
  }
}

inline void compute_panel(const Job& job, std::int64_t number) {
  compute_columns(job, number, 0, std::min(job.linear->panel, job.linear->columns - number * job.linear->panel));
}

inline void compute_panels(const void* job, std::int64_t first, std::int64_t last) {
  for (std::int64_t number = first; number < last; ++number) compute_panel(*static_cast<const Job*>(job), number);
}

using Scratch = std::unique_ptr<void, void (*)(void*)>;

inline Scratch scratch(std::int64_t bytes) {
  return {std::aligned_alloc(64, (static_cast<std::size_t>(bytes) + 127) / 64 * 64), std::free};
}

inline Status compute(const Linear& linear, const Route& route, const float* laid_out, float* out, std::int64_t rows) {
  const std::int64_t fair = linear.panels / (linear.pool->threads() * chunks_per_thread);
  const std::int64_t work = linear.panel * linear.shape.rows * rows;  // of one panel
  const std::int64_t worth = chunk_work / work + 1;
  const bool wake = linear.panels * work >= wake_work;
  // Activations that fit the second-level cache are read as a whole for each panel; otherwise the part for one block is
  // read for all panels.
  const bool whole = rows * route.x_length * static_cast<std::int64_t>(sizeof(float)) <= cached_bytes;
  const std::int64_t step = whole ? linear.blocks : 1;
  for (std::int64_t block = 0; block < linear.blocks; block += step) {
    const Job job{&linear, &route, laid_out, out, rows, block, block + step};
    const Status status = linear.pool->run(linear.panels, std::max(fair, worth), wake, compute_panels, &job);
    if (status != OK) return status;
  }
  return OK;
}

inline std::int64_t whole_blocks(std::int64_t rows, const Route& route) {
  return (rows + route.rows - 1) / route.rows * route.rows;
}

// T rows of x, laid out `rows_at_once` at a time. `lay(row, count, to)` lays out `count` rows from `row` on.
template <class Lay>
inline Status in_batches(const Linear& linear, const Route& route, float* out, std::int64_t T, const Lay& lay) {
  const std::int64_t most = whole_blocks(std::min(T, rows_at_once), route);
  const Scratch room = scratch(most * route.x_length * sizeof(float));
  if (!room) return NO_MEMORY;
  float* const laid_out = static_cast<float*>(room.get());
  for (std::int64_t t = 0; t < T; t += rows_at_once) {
    const std::int64_t rows = std::min(T - t, rows_at_once);
    for (std::int64_t row = 0; row < rows; row += route.rows)
      lay(t + row, std::min(rows - row, route.rows), laid_out + row * route.x_length);
    const Status status = compute(linear, route, laid_out, out + t * linear.columns, rows);
    if (status != OK) return status;
  }
  return OK;
}

// Lays out `count` rows of float32 activations, at most as many as the kernel computes at once.
inline void lay_floats(const Groups& shape, const Route& route, const float* x, std::int64_t count, float* to) {
  if (route.layout == SUMS) lay_sums(shape, route, x, to);
  else lay_values(shape, route, x, count, to);
}

// Y = X W for T rows of float32 activations. The bits of a row of the result depend neither on T nor on the number of
// threads. INEXACT if the powers of two of the route would round an activation; then nothing is written.
inline Status multiply(const Linear& linear, const Route& route, const float* x, float* out, std::int64_t T) {
  if (any_inexact(route, x, T * linear.shape.rows)) return INEXACT;
  return in_batches(linear, route, out, T, [&](std::int64_t row, std::int64_t count, float* to) {
    lay_floats(linear.shape, route, x + row * linear.shape.rows, count, to);
  });
}

// The same for T rows of mantissas and exponents, by the integer contract.
inline Status multiply_blocks(const Linear& linear, const Route& route, const std::int8_t* mantissas,
                              const std::int16_t* exponents, float* out, std::int64_t T) {
  const std::int64_t K = linear.shape.rows, blocks = (K + activation_block - 1) / activation_block;
  return in_batches(linear, route, out, T, [&](std::int64_t row, std::int64_t count, float* to) {
    lay_mantissas(linear.shape, route, mantissas + row * K, exponents + row * blocks, count, blocks, to);
  });
}

// The same for float32 activations, which are cast first.
inline Status multiply_cast(const Linear& linear, const Route& route, const float* x, float* out, std::int64_t T) {
  const std::int64_t K = linear.shape.rows, blocks = (K + activation_block - 1) / activation_block;
  const Scratch room = scratch(T * (blocks * sizeof(std::int16_t) + K));
  if (!room) return NO_MEMORY;
  std::int16_t* const exponents = static_cast<std::int16_t*>(room.get());
  std::int8_t* const mantissas = reinterpret_cast<std::int8_t*>(exponents + T * blocks);
  for (std::int64_t t = 0; t < T; ++t) cast_blocks(x + t * K, K, mantissas + t * K, exponents + t * blocks);
  return multiply_blocks(linear, route, mantissas, exponents, out, T);
}

}  // namespace lowbit
