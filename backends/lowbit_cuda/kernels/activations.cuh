// Activations in shared memory, ready to be multiplied by codes; linear.cuh explains how they are scaled.
#pragma once

#include "codes.cuh"

constexpr int32_t SHIFTED = 75;
constexpr float DESCALED = 0x1p74f;
constexpr uint32_t LEAST = power_bits(-52), RANGE = power_bits(53) - power_bits(-52);

// **Copying activations to shared memory**: those of all tokens of a block, for as many segments as fit.
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
    return held.read4((token * slots + slot) * STRIDE + row);  // read again: no registers are left to keep them
  }

  // The sum over the group that ends with this piece, or over the part of that group that lies in the segment.
  __device__ float sum(int32_t token, int32_t slot, int32_t piece) const {
    return held.get((token * slots + slot) * STRIDE + SEGMENT + piece);
  }

  // Fill the slots with the segments from `base` on. All threads must call this; afterwards all may read. Returns
  // whether all activations are in the range in which codes can be used as floats.
  __device__ bool stage(const Segments<BITS>& all, int32_t base, bool scaled) const {
    constexpr int32_t WIDTH = SEGMENT / 4, STEP = THREADS / WIDTH, AHEAD = TOKENS == 1 ? 8 : 1;
    const int32_t quad = threadIdx.x % WIDTH * 4;
    float factors[4];
    UNROLL for (int32_t i = 0; i < 4; i++) {
      factors[i] = scaled ? power_of_two(SHIFTED - Code<BITS>::place(quad + i)) : 1.0f;
    }
    Walk<BITS> walk(all, base + threadIdx.x / WIDTH, STEP);
    bool others = false;
    ROLLED for (int32_t round = 0; round < slots / STEP; round += AHEAD) {
      float4 fours[AHEAD][TOKENS];  // loads in flight at the same time
      UNROLL for (int32_t i = 0; i < AHEAD; i++, walk.advance()) {
        const bool inside = quad < walk.length() && round + i < slots / STEP;
        const size_t row = walk.first_row() + quad;
        UNROLL for (int32_t t = 0; t < TOKENS; t++) {
          fours[i][t] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
          if (inside && t < tokens) fours[i][t] = load4(x + static_cast<size_t>(t) * all.rows + row);
        }
      }
      UNROLL for (int32_t i = 0; i < AHEAD; i++) {
        if (round + i >= slots / STEP) break;
        const int32_t slot = (round + i) * STEP + threadIdx.x / WIDTH;
        UNROLL for (int32_t t = 0; t < TOKENS; t++) {
          const float4 four = fours[i][t];
          others |= !(fits(four.x) & fits(four.y) & fits(four.z) & fits(four.w));
          const int32_t at = (t * slots + slot) * STRIDE;
          const float sum = group_sum((four.x + four.y) + (four.z + four.w), all.pieces_of_group);
          if (quad % Code<BITS>::PIECE == 0) held.set(at + SEGMENT + quad / Code<BITS>::PIECE, sum);
          held.set4(at + quad, make_float4(four.x * factors[0], four.y * factors[1], four.z * factors[2],
                                           four.w * factors[3]));
        }
      }
    }
    return !__syncthreads_or(others);
  }

 private:
  static __device__ bool fits(float number) {
    const uint32_t magnitude = __float_as_uint(number) & 0x7fffffffu;
    return (magnitude - LEAST < RANGE) | (magnitude == 0);
  }

  // The sum over the threads that hold the rows of one group in a segment.
  static __device__ float group_sum(float value, int32_t pieces) {
    constexpr int32_t OF_PIECE = Code<BITS>::PIECE / 4;
    value = sum_of_lanes<OF_PIECE>(value);
    UNROLL for (int32_t distance = 1; distance < Code<BITS>::PIECES; distance *= 2) {
      const float other = __shfl_xor_sync(ALL_LANES, value, distance * OF_PIECE);
      value += distance < pieces ? other : 0.0f;
    }
    return value;
  }
};
