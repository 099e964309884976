// The operations between products: norms, gates, sums, and the gathering and scattering of rows.
#include "numbers.cuh"

// x g / sqrt(mean of x^2 + epsilon), one token per block. Where the squares overflow, every element becomes NaN: the
// reciprocal of the root would be 0 and hide the overflow.
KERNEL(256, 4)
rms_norm(float* y, const float* x, const float* gain, [[maybe_unused]] int32_t tokens, int32_t columns, float epsilon) {
  const Shared<float> sums(0);
  const size_t token = static_cast<size_t>(blockIdx.x) * columns;
  float sum = 0.0f;
  for (int32_t c = threadIdx.x; c < columns; c += 256) sum = fmaf(x[token + c], x[token + c], sum);
  const float mean = sum_of_block(sum, sums) / static_cast<float>(columns) + epsilon;
  const float root = mean <= 0x1.fffffep127f ? 1.0f / sqrtf(mean) : mean - mean;  // NaN
  for (int32_t c = threadIdx.x; c < columns; c += 256) y[token + c] = x[token + c] * root * gain[c];
}

// Each thread computes four elements, 256 apart, so that the elements of a warp are contiguous.
template <class Function>
__device__ inline void for_elements(int32_t count, Function function) {
  UNROLL for (int32_t i = 0; i < 4; i++) {
    const size_t element = (static_cast<size_t>(blockIdx.x) * 4 + i) * 256 + threadIdx.x;
    if (element < static_cast<size_t>(count)) function(element);
  }
}

KERNEL(256, 4)
swiglu(float* y, const float* gate, const float* up, int32_t count) {
  for_elements(count, [=](size_t i) { y[i] = silu(gate[i]) * up[i]; });
}

KERNEL(256, 4)
add(float* y, const float* x, int32_t count) {
  for_elements(count, [=](size_t i) { y[i] += x[i]; });
}

KERNEL(256, 4)
combine(float* y, const float* answers, const float* weights, [[maybe_unused]] int32_t tokens, int32_t experts,
        int32_t columns) {
  const int32_t column = blockIdx.x * 256 + threadIdx.x;
  if (column >= columns) return;
  const size_t token = blockIdx.y;
  float sum = 0.0f;
  for (int32_t e = 0; e < experts; e++) {
    const size_t answer = token * experts + e;
    sum = fmaf(weights[answer], answers[answer * columns + column], sum);
  }
  y[token * columns + column] += sum;
}

// **Rows.** Each block copies a part of one row.

template <class Number>
__device__ inline void gather(float* y, const Number* x, const int32_t* index, int32_t rows, int32_t columns) {
  const int32_t column = blockIdx.x * 256 + threadIdx.x, row = index[blockIdx.y];
  if (column >= columns) return;
  const bool there = row >= 0 && row < rows;
  y[static_cast<size_t>(blockIdx.y) * columns + column] =
      there ? load1(x + static_cast<size_t>(row) * columns + column) : 0.0f;
}

KERNEL(256, 4)
gather_f32(float* y, const float* x, const int32_t* index, [[maybe_unused]] int32_t count, int32_t rows,
           int32_t columns) {
  gather(y, x, index, rows, columns);
}

KERNEL(256, 4)
gather_f16(float* y, const uint16_t* x, const int32_t* index, [[maybe_unused]] int32_t count, int32_t rows,
           int32_t columns) {
  gather(y, x, index, rows, columns);
}

KERNEL(256, 4)
scatter(float* y, const float* x, const int32_t* index, [[maybe_unused]] int32_t count, int32_t rows,
        int32_t columns) {
  const int32_t column = blockIdx.x * 256 + threadIdx.x, row = index[blockIdx.y];
  if (column >= columns || row < 0 || row >= rows) return;
  y[static_cast<size_t>(row) * columns + column] = x[static_cast<size_t>(blockIdx.y) * columns + column];
}
