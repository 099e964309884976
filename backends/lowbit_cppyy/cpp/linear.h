// One call of a prepared matrix: lay out x, hand the panels to the threads, write exactly the columns that exist.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>

#include "pool.h"

namespace lowbit {

// What the generator makes: a tile of columns of one panel times `rows` rows of x (microkernel.py tells the streams).
using MicroKernel = void (*)(const std::uint32_t* w, const float* x, float* y, std::int64_t groups,
                             const std::int32_t* units);

struct Kernel {
  MicroKernel call;
  std::int64_t rows;     // rows of x at once
  std::int64_t columns;  // columns at once, a divisor of the panel
};

// A matrix of K rows and N columns in panels (layout.py), and the kernels for it.
struct Linear {
  const std::uint32_t* stream;  // all panels, one after the other
  const std::int32_t* units;    // for each group, its units
  std::int64_t rows, columns, group_size, groups;
  std::int64_t panel;        // columns of a panel
  std::int64_t panel_words;  // elements of a panel
  std::int64_t unit_codes;   // codes of a unit
  std::int64_t x_length;     // elements of one laid-out row of x: all units' codes, and a sum for each group
  const Kernel* one;         // for one row of x
  const Kernel* many;        // for several
  Pool* pool;
};

constexpr std::int64_t max_rows = 8;          // of Kernel::rows
constexpr std::int64_t max_panel = 128;       // of Linear::panel
constexpr std::int64_t rows_at_once = 64;     // rows of x laid out together: bounds the memory that a call takes
constexpr std::int64_t chunk_work = 1 << 16;  // multiply-adds that are worth a chunk of their own, 2.5 µs where measured
constexpr std::int64_t wake_work = 1 << 21;   // and worth waking threads that sleep: 80 µs, since they come after 40
constexpr std::int64_t chunks_per_thread = 16;

// The sum of n floats: eight running sums side by side, then a tree. The order is the same on every processor.
inline float group_sum(const float* x, std::int64_t n) {
  float sum[8] = {0, 0, 0, 0, 0, 0, 0, 0};
  std::int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int lane = 0; lane < 8; ++lane) sum[lane] += x[i + lane];
  for (int lane = 0; i + lane < n; ++lane) sum[lane] += x[i + lane];
  return ((sum[0] + sum[4]) + (sum[2] + sum[6])) + ((sum[1] + sum[5]) + (sum[3] + sum[7]));
}

// Rows of x as a kernel reads them: group after group, zeros up to a whole unit, then the group's sum; the rows of a
// block side by side, zeros for rows that do not exist.
inline void lay_out(const Linear& linear, const float* x, std::int64_t count, std::int64_t block, float* to) {
  for (std::int64_t g = 0; g < linear.groups; ++g) {
    const std::int64_t start = g * linear.group_size;
    const std::int64_t held = std::min(linear.group_size, linear.rows - start);
    const std::int64_t codes = linear.units[g] * linear.unit_codes;
    for (std::int64_t r = 0; r < block; ++r) {
      const std::int64_t length = r < count ? held : 0;
      const float* const from = length > 0 ? x + r * linear.rows + start : nullptr;
      for (std::int64_t k = 0; k < length; ++k) to[k * block + r] = from[k];
      for (std::int64_t k = length; k < codes; ++k) to[k * block + r] = 0.0f;
      to[codes * block + r] = group_sum(from, length);
    }
    to += (codes + 1) * block;
  }
}

// What the threads share during one call.
struct Job {
  const Linear* linear;
  const float* x;  // laid out
  float* out;
  std::int64_t rows;
};

// Blocks of rows of x go to the kernel for many; a last row that is left alone, to the kernel for one.
inline const Kernel& kernel_for(const Linear& linear, std::int64_t rows_left) {
  return rows_left == 1 ? *linear.one : *linear.many;
}

inline void compute_panel(const Job& job, std::int64_t number) {
  const Linear& linear = *job.linear;
  const std::uint32_t* const w = linear.stream + number * linear.panel_words;
  const std::int64_t column = number * linear.panel;
  const std::int64_t width = std::min(linear.panel, linear.columns - column);
  alignas(64) float tile[max_rows * max_panel];
  for (std::int64_t row = 0; row < job.rows;) {
    const Kernel& kernel = kernel_for(linear, job.rows - row);
    for (std::int64_t j = 0; j < width; j += kernel.columns)
      kernel.call(w + j, job.x + row * linear.x_length, tile + j, linear.groups, linear.units);
    for (std::int64_t r = 0; r < kernel.rows && row + r < job.rows; ++r)
      std::memcpy(job.out + (row + r) * linear.columns + column, tile + r * linear.panel, width * sizeof(float));
    row += kernel.rows;
  }
}

inline void compute_panels(const void* job, std::int64_t first, std::int64_t last) {
  for (std::int64_t number = first; number < last; ++number) compute_panel(*static_cast<const Job*>(job), number);
}

// Y = X W for T rows of x. A row of the result has the same bits whatever T is and however many threads there are.
inline Status multiply(const Linear& linear, const float* x, float* out, std::int64_t T) {
  const std::int64_t most = std::min(T, rows_at_once) + linear.many->rows;  // room for rows that fill the last block
  const std::size_t bytes = most * linear.x_length * sizeof(float);
  const std::unique_ptr<void, void (*)(void*)> scratch(std::aligned_alloc(64, (bytes + 63) / 64 * 64), std::free);
  if (!scratch) return NO_MEMORY;
  float* const laid_out = static_cast<float*>(scratch.get());

  for (std::int64_t t = 0; t < T; t += rows_at_once) {
    const std::int64_t rows = std::min(T - t, rows_at_once);
    for (std::int64_t row = 0; row < rows;) {
      const std::int64_t block = kernel_for(linear, rows - row).rows;
      lay_out(linear, x + (t + row) * linear.rows, std::min(rows - row, block), block, laid_out + row * linear.x_length);
      row += block;
    }
    const Job job{&linear, laid_out, out + t * linear.columns, rows};
    const std::int64_t panels = (linear.columns + linear.panel - 1) / linear.panel;
    const std::int64_t fair = panels / (linear.pool->threads() * chunks_per_thread);
    const std::int64_t work = linear.panel * linear.x_length * rows;  // of one panel
    const std::int64_t worth = chunk_work / work + 1;
    const bool wake = panels * work >= wake_work;
    const Status status = linear.pool->run(panels, std::max(fair, worth), wake, compute_panels, &job);
    if (status != OK) return status;
  }
  return OK;
}

}  // namespace lowbit
