// Products with dense matrices stored column by column: Y = X W. Each block computes one element: its 256 threads take
// turns at four rows of the column each, and their sums are added.
#include "numbers.cuh"

template <class Weight>
__device__ inline void dense(float* y, const float* x, const Weight* weights, int32_t rows, int32_t columns) {
  const Shared<float> sums(0);
  const float* token = x + static_cast<size_t>(blockIdx.y) * rows;
  const Weight* column = weights + static_cast<size_t>(blockIdx.x) * rows;
  float sum = 0.0f;
  UNROLL_4 for (int32_t row = threadIdx.x * 4; row < rows; row += 4 * 256) {
    const float4 a = load4(token + row), w = load4(column + row);
    sum = fmaf(a.x, w.x, sum);
    sum = fmaf(a.y, w.y, sum);
    sum = fmaf(a.z, w.z, sum);
    sum = fmaf(a.w, w.w, sum);
  }
  sum = sum_of_block(sum, sums);
  if (threadIdx.x == 0) y[static_cast<size_t>(blockIdx.y) * columns + blockIdx.x] = sum;
}

KERNEL(256, 4)
dense_f32(float* y, const float* x, const float* weights, [[maybe_unused]] int32_t tokens, int32_t rows,
          int32_t columns) {
  dense(y, x, weights, rows, columns);
}

KERNEL(256, 4)
dense_f16(float* y, const float* x, const uint16_t* weights, [[maybe_unused]] int32_t tokens, int32_t rows,
          int32_t columns) {
  dense(y, x, weights, rows, columns);
}
