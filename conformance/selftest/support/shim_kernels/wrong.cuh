// Kernels with one mistake each, which the runtime must find whatever the order of their threads.
#include "device.cuh"

#define WRONG(name) KERNEL(64, 1) name(const float* x, float* out, [[maybe_unused]] int32_t n)
#define THREAD static_cast<int32_t>(threadIdx.x)

WRONG(missing_barrier) {
  Shared<float> values(0);
  values.set(THREAD, x[THREAD]);
  out[THREAD] = values.get(n - 1 - THREAD);
}

WRONG(missing_second_barrier) {
  Shared<float> word(0);
  float sum = 0;
  for (int32_t i = 0; i < 2; ++i) {
    if (THREAD == i) word.set(0, x[i]);
    __syncthreads();
    sum += word.get(0);
  }
  out[THREAD] = sum;
}

WRONG(two_write) {
  Shared<float> values(0);
  values.set(THREAD / 2, x[THREAD]);
  __syncthreads();
  out[THREAD] = values.get(THREAD / 2);
}

WRONG(missing_warp_barrier) {
  Shared<float> values(0);
  values.set(THREAD, x[THREAD]);
  out[THREAD] = values.get(THREAD ^ 1) + static_cast<float>(n);
}

WRONG(shuffle_is_no_barrier) {
  Shared<float> values(0);
  values.set(THREAD, x[THREAD]);
  const float other = __shfl_xor_sync(0xffffffffu, x[THREAD], n);
  out[THREAD] = values.get(THREAD ^ 1) + other;
}

WRONG(barrier_of_half_a_warp) {
  Shared<float> values(0);
  values.set(THREAD, x[THREAD]);
  __syncwarp(THREAD % 32 < 16 ? 0xffffu : 0xffff0000u);
  out[THREAD] = values.get(THREAD ^ 16) + static_cast<float>(n);
}

WRONG(warp_barrier_between_warps) {
  Shared<float> values(0);
  values.set(THREAD, x[THREAD]);
  __syncwarp();
  out[THREAD] = values.get(THREAD ^ 32) + static_cast<float>(n);
}

// A third lane reads what the writer does not wait for.
WRONG(third_reader) {
  Shared<float> values(0);
  if (THREAD == 0) values.set(0, x[0]);
  __syncthreads();
  const float value = THREAD < 3 ? values.get(0) : 0;
  if (THREAD < 2) __syncwarp(3);
  if (THREAD == 0) values.set(0, static_cast<float>(n));
  out[THREAD] = value;
}

WRONG(divergent_barrier) {
  if (THREAD < n / 2) {
    __syncthreads();
  }
  out[THREAD] = x[THREAD];
}

WRONG(two_barriers) {
  if (THREAD < n / 2) {
    __syncthreads();
  } else {
    __syncthreads();
  }
  out[THREAD] = x[THREAD];
}

WRONG(left_early) {
  out[THREAD] = x[THREAD];
  if (THREAD == n - 1) return;
  __syncthreads();
}

WRONG(barrier_against_shuffle) {
  out[THREAD] = x[THREAD];
  if (THREAD == n - 1) {
    __syncthreads();
  } else {
    out[THREAD] = __shfl_xor_sync(0xffffffffu, out[THREAD], 1);
  }
}

WRONG(mask_without_me) {
  out[THREAD] = __shfl_xor_sync(0x0000ffffu, x[THREAD], n - 63);
}

WRONG(lane_outside_mask) {
  out[THREAD] = x[THREAD];
  if (THREAD % 32 < 16) out[THREAD] = __shfl_xor_sync(0x0000ffffu, x[THREAD], n / 4);
}

WRONG(lanes_left) {
  out[THREAD] = x[THREAD];
  if (THREAD % 32 < n / 4) out[THREAD] = __shfl_xor_sync(0xffffffffu, x[THREAD], 1);
}

WRONG(different_masks) {
  const uint32_t mask = THREAD % 32 < 16 ? 0xffffffffu : 0xffff0001u;
  out[THREAD] = __shfl_xor_sync(mask, x[THREAD], n / 64);
}

WRONG(circle) {
  const uint32_t masks[3] = {3, 6, 5};
  out[THREAD] = x[n - 1 - THREAD];
  if (THREAD < 3) __syncwarp(masks[THREAD]);
}

WRONG(nobody_wrote) {
  Shared<float> values(0);
  if (THREAD > 0) values.set(THREAD, x[THREAD]);
  __syncthreads();
  out[THREAD] = values.get(n - 1 - THREAD);
}

WRONG(nobody_wrote_variable) {
  __shared__ float values[64];
  if (THREAD > 0) values[THREAD] = x[THREAD];
  __syncthreads();
  out[THREAD] = values[n - 1 - THREAD];
}

WRONG(last_block_wrote) {
  Shared<float> values(0);
  if (blockIdx.x == 0 || n == 0) values.set(THREAD, x[THREAD]);
  out[64 * blockIdx.x + THREAD] = values.get(THREAD);
}

WRONG(beyond) {
  out[THREAD] = x[THREAD + (THREAD == n - 1)];
}

WRONG(below) {
  out[THREAD - (THREAD == 0 ? n : 0)] = x[THREAD];
}

WRONG(beyond_shared) {
  Shared<float> values(0);
  values.set(THREAD + (THREAD == n - 1), x[THREAD]);
  out[THREAD] = x[THREAD];
}

WRONG(far) {
  out[THREAD] = *(x + (int64_t(1) << 40) * n + THREAD);
}

WRONG(not_aligned) {
  const float4 four = *reinterpret_cast<const float4*>(x + (THREAD % 15) * 4 + (THREAD == n - 1));
  out[THREAD] = four.x + four.y + four.z + four.w;
}

WRONG(writes_input) {
  const_cast<float*>(x)[THREAD] = static_cast<float>(n);
  out[THREAD] = 0;
}

WRONG(reads_output) {
  out[THREAD] += x[THREAD] + static_cast<float>(n);
}

WRONG(leaves_output) {
  if (THREAD < n - 1) out[THREAD] = x[THREAD];
}

WRONG(blocks_write) {
  for (int32_t i = THREAD; i < 2 * n; i += 64) out[i] = x[THREAD];
}

WRONG(threads_write) {
  out[THREAD] = x[THREAD];
  if (THREAD == n - 1) out[0] = x[0];
}

WRONG(reads_neighbour) {
  out[THREAD] = x[THREAD];
  out[THREAD] += out[(THREAD + 1) % n];
}

WRONG(stack_of_another) {
  __shared__ const float* places[2];
  float mine[8];
  for (int32_t i = 0; i < 8; ++i) mine[i] = x[(THREAD + i) % n];
  if (THREAD == 0) places[0] = mine;
  __syncthreads();
  out[THREAD] = places[0][n / 16];
}

WRONG(undefined) {
  out[THREAD] = static_cast<float>(1 << (n - THREAD)) + x[THREAD];
}

// What would go well on a device that runs all threads by turns.
WRONG(waits_by_reading) {
  __shared__ int32_t ready;
  if (THREAD == 0) ready = 0;
  __syncthreads();
  if (THREAD == n - 1) ready = 1;
  while (*const_cast<volatile int32_t*>(&ready) == 0) {
  }
  out[THREAD] = x[THREAD];
}
