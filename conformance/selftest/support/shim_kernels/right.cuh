// Kernels that do everything right: what they use, the runtime must let pass, whatever the order of their threads.
#include "device.cuh"

// A sum over a block, by way of warps.
KERNEL(64, 1) block_sum(const float* x, float* out, int32_t n) {
  Shared<float> parts(0);
  float sum = 0;
  for (int32_t i = threadIdx.x; i < n; i += blockDim.x) sum += x[blockIdx.x * n + i];
  for (int32_t offset = 16; offset > 0; offset /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, offset);
  if (threadIdx.x % 32 == 0) parts.set(threadIdx.x / 32, sum);
  __syncthreads();
  if (threadIdx.x == 0) out[blockIdx.x] = parts.get(0) + parts.get(1);
}

// Shared variables of the kernel's own; bytes, of which four threads share a word; twice the same memory.
KERNEL(64, 1) reverse(const float* x, float* out, int32_t n) {
  __shared__ uint8_t order[64];
  __shared__ float values[64];
  order[threadIdx.x] = static_cast<uint8_t>(n - 1 - threadIdx.x);
  values[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  const float value = values[order[threadIdx.x]];
  __syncthreads();
  values[threadIdx.x] = value;
  __syncwarp();
  out[threadIdx.x] = values[threadIdx.x ^ 31] + values[threadIdx.x];
}

// Four threads' numbers at once, and parts of a warp: sums of eight lanes, from the first to each.
KERNEL(64, 1) prefix(const float* x, float* out, int32_t n) {
  Shared<float> all(0);
  if (threadIdx.x < 16) all.set4(4 * threadIdx.x, *reinterpret_cast<const float4*>(x + 4 * threadIdx.x));
  __syncthreads();
  float sum = all.get(threadIdx.x);
  const uint32_t half = threadIdx.x % 32 < 16 ? 0x0000ffffu : 0xffff0000u;
  for (int32_t step = 1; step < 8; step *= 2) {
    const float other = __shfl_up_sync(half, sum, step, 8);
    if (static_cast<int32_t>(threadIdx.x % 8) >= step) sum += other;
  }
  const uint32_t lane = threadIdx.x % 32;
  __syncwarp(half);
  if (lane == 0) all.set(threadIdx.x + 1, 0);  // of the other lanes only lane 1 read it
  __syncwarp(half);
  if (threadIdx.x < static_cast<uint32_t>(n)) out[threadIdx.x] = sum + __shfl_sync(half, sum, 0, 16);
}

// Votes, of the warp and of the block; and more than one dimension of blocks.
KERNEL(64, 1) votes(const float* x, float* out, int32_t n) {
  const bool positive = x[threadIdx.x] > 0;
  const uint32_t ballot = __ballot_sync(0xffffffffu, positive);
  const int32_t any = __any_sync(0xffffffffu, positive) + 2 * __all_sync(0xffffffffu, positive);
  const int32_t count = __syncthreads_count(positive) + 64 * __syncthreads_or(!positive) + 128 * __syncthreads_and(n);
  const int32_t last = __shfl_down_sync(0xffffffffu, count, 1);
  const uint32_t block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  out[64 * block + threadIdx.x] = static_cast<float>(__popc(ballot) + 32 * any + count - last);
}

// Memory of the device between threads of one block, ordered by its barriers.
KERNEL(64, 1) in_place(float* x, int32_t n) {
  for (int32_t step = 1; step < n; step *= 2) {
    const float other = x[(threadIdx.x + step) % 64];
    __syncthreads();
    x[threadIdx.x] += other;
    __syncthreads();
  }
}

// All threads read a word together, and one writes it afterwards.
KERNEL(64, 1) broadcast(const float* x, float* out, int32_t n) {
  Shared<float> word(0);
  float sum = 0;
  for (int32_t i = 0; i < n; ++i) {
    __syncthreads();
    if (threadIdx.x == static_cast<uint32_t>(i)) word.set(0, x[i]);
    __syncthreads();
    sum += word.get(0);
  }
  out[threadIdx.x] = sum;
}
