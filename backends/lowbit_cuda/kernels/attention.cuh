// Attention: rotary embeddings, writing keys and values to the cache, and attention over the cache.
//
// Caches are G x C x d_h: the C rows of a key-value head are contiguous. Kernels read the position of the first token
// from memory. Whatever its value is, they access nothing outside the table and the cache.
#include "numbers.cuh"

constexpr int32_t BFP_BLOCK = 32, CHUNK = 256, WARPS = 8, MOST_HEAD_DIM = 256;

// The position of token t of the launch, or -1 if it lies outside the cache.
__device__ inline int32_t place_of(const int32_t* position, int32_t t, int32_t capacity) {
  const int32_t first = *position;
  return first >= 0 && first < capacity - t ? first + t : -1;
}

// **Rotation**, half-split: channel c is paired with channel c + d_h/2. A row of the table holds cosines, then sines.
KERNEL(256, 4)
rope(float* x, const float* table, const int32_t* position, [[maybe_unused]] int32_t tokens, int32_t heads,
     int32_t head_dim, int32_t context) {
  const int32_t half = head_dim / 2, pair = blockIdx.x * 256 + threadIdx.x;
  const int32_t place = place_of(position, blockIdx.y, context);
  if (pair >= heads * half || place < 0) return;
  const int32_t head = pair / half, channel = pair - head * half;
  const float cosine = table[static_cast<size_t>(place) * head_dim + channel];
  const float sine = table[static_cast<size_t>(place) * head_dim + half + channel];
  float* first = x + (static_cast<size_t>(blockIdx.y) * heads + head) * head_dim + channel;
  const float a = first[0], b = first[half];
  first[0] = fmaf(a, cosine, -(b * sine));
  first[half] = fmaf(b, cosine, a * sine);
}

// **Writing the cache.** Each thread writes one channel of one head.
struct Target {
  size_t from, to;  // elements
  bool there;

  __device__ Target(const int32_t* position, int32_t kv_heads, int32_t head_dim, int32_t capacity) {
    const int32_t element = blockIdx.x * 256 + threadIdx.x, head = element / head_dim;
    const int32_t place = place_of(position, blockIdx.y, capacity);
    there = element < kv_heads * head_dim && place >= 0;
    from = static_cast<size_t>(blockIdx.y) * kv_heads * head_dim + element;
    to = (static_cast<size_t>(head) * capacity + place) * head_dim + (element - head * head_dim);
  }
};

KERNEL(256, 4)
append_f32(float* cache, const float* x, const int32_t* position, [[maybe_unused]] int32_t tokens, int32_t kv_heads,
           int32_t head_dim, int32_t capacity) {
  const Target target(position, kv_heads, head_dim, capacity);
  if (target.there) cache[target.to] = x[target.from];
}

KERNEL(256, 4)
append_f16(uint16_t* cache, const float* x, const int32_t* position, [[maybe_unused]] int32_t tokens, int32_t kv_heads,
           int32_t head_dim, int32_t capacity) {
  const Target target(position, kv_heads, head_dim, capacity);
  if (target.there) cache[target.to] = to_half(x[target.from]);
}

// The exponent of a block of BFP12 from the bits of its largest magnitude f 2^E, 1/2 <= f < 1: E - 3, from -127 to 127.
__device__ inline int32_t bfp12_exponent(uint32_t largest) {
  const int32_t normal = static_cast<int32_t>(largest >> 23) - 126;
  const int32_t power = normal > -126 ? normal : -117 - __clz(static_cast<int32_t>(largest));
  return power - 3 < -127 || largest == 0 ? -127 : power - 3;
}

// One warp writes one block: 32 channels with one exponent. A byte holds two mantissas, the first in its low half.
KERNEL(256, 4)
append_bfp12(uint8_t* cache, uint8_t* exponents, const float* x, const int32_t* position,
             [[maybe_unused]] int32_t tokens, int32_t kv_heads, int32_t head_dim, int32_t capacity) {
  const Target target(position, kv_heads, head_dim, capacity);
  const float value = target.there ? x[target.from] : 0.0f;
  float largest = fabsf(value);
  largest = max_of_lanes<32>(largest);
  const int32_t exponent = bfp12_exponent(__float_as_uint(largest));
  // 2^-exponent, which is subnormal for an exponent of 127.
  const float step = exponent == 127 ? 0x1p-127f : power_of_two(-exponent);
  const float scaled = fminf(fmaxf(value * step, -7.0f), 7.0f);
  const uint32_t rounded = __float_as_uint(scaled + 12582912.0f);  // its low bits: the integer, ties to even
  const uint32_t other = __shfl_xor_sync(ALL_LANES, rounded, 1);
  if (!target.there) return;
  if (threadIdx.x % 2 == 0) cache[target.to / 2] = static_cast<uint8_t>((rounded & 15u) | (other & 15u) << 4);
  if (threadIdx.x % BFP_BLOCK == 0) exponents[target.to / BFP_BLOCK] = static_cast<uint8_t>(exponent + 127);
}

// **Four channels of a cached row**, beginning at `element`.
struct PlainRows {
  const float* rows;
  __device__ float4 get(size_t element) const { return load4(rows + element); }
};

struct HalfRows {
  const uint16_t* rows;
  __device__ float4 get(size_t element) const { return load4(rows + element); }
};

struct Bfp12Rows {
  const uint8_t* mantissas;
  const uint8_t* exponents;

  __device__ float4 get(size_t element) const {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(mantissas + element / 2);
    const uint32_t stored = exponents[element / BFP_BLOCK];
    const float step = __uint_as_float(stored == 0 ? 0x00400000u : stored << 23);
    return make_float4(mantissa(bits) * step, mantissa(bits >> 4) * step, mantissa(bits >> 8) * step,
                       mantissa(bits >> 12) * step);
  }

  __device__ static float mantissa(uint32_t bits) { return static_cast<float>(static_cast<int32_t>(bits << 28) >> 28); }
};

// **Attention over the cache.** Each block computes one head of one token and processes the visible tokens in chunks.
// For each chunk it computes one score per thread, updates the maximum of all scores so far, and adds the values,
// weighted by the exponentials of their scores minus that maximum. Where a chunk raises the maximum, the earlier sums
// are multiplied by the exponential of the difference. Each warp adds every eighth value, and each of its threads four
// or eight channels of it; at the end the sums of the warps are added one after the other.
template <class Keys, class Values>
__device__ inline void attend(float* y, const float* queries, const Keys& keys, const Values& values,
                              const int32_t* position, int32_t heads, int32_t kv_heads, int32_t head_dim,
                              int32_t capacity, int32_t window) {
  const Shared<float> query(0), shares(4 * MOST_HEAD_DIM), maxima(4 * (MOST_HEAD_DIM + CHUNK));
  const Shared<float> totals(4 * (MOST_HEAD_DIM + CHUNK + WARPS)), parts(4 * (MOST_HEAD_DIM + CHUNK + 2 * WARPS));
  const int32_t thread = threadIdx.x, lane = thread % 32, warp = thread / 32, head = blockIdx.x;
  const size_t own = (static_cast<size_t>(blockIdx.y) * heads + head) * head_dim;
  const int32_t last = place_of(position, blockIdx.y, capacity);
  if (last < 0) {
    if (thread < head_dim) y[own + thread] = 0.0f;
    return;
  }
  const size_t rows = static_cast<size_t>(head / (heads / kv_heads)) * capacity;
  const float per_root = 1.0f / sqrtf(static_cast<float>(head_dim));
  if (thread < head_dim) query.set(thread, queries[own + thread]);
  float greatest = -infinity(), total = 0.0f, sums[2][4] = {};
  for (int32_t base = window > 0 && last >= window ? last - window + 1 : 0; base <= last; base += CHUNK) {
    const int32_t count = last - base + 1 < CHUNK ? last - base + 1 : CHUNK;
    __syncthreads();
    float score = -infinity();
    for (int32_t i = 0; i < 32; i++) {
      const int32_t token = warp * 32 + i;
      if (token >= count) break;
      float dot = 0.0f;
      for (int32_t c = lane * 4; c < head_dim; c += 128) {
        const float4 q = query.get4(c), k = keys.get((rows + base + token) * head_dim + c);
        dot = fmaf(q.x, k.x, dot);
        dot = fmaf(q.y, k.y, dot);
        dot = fmaf(q.z, k.z, dot);
        dot = fmaf(q.w, k.w, dot);
      }
      dot = sum_of_lanes<32>(dot);
      if (i == lane) score = dot * per_root;
    }
    const float of_warp = max_of_lanes<32>(score);
    if (lane == 0) maxima.set(warp, of_warp);
    __syncthreads();
    const float before = greatest;
    UNROLL for (int32_t w = 0; w < WARPS; w++) greatest = fmaxf(greatest, maxima.get(w));
    const float share = thread < count ? exponential(score - greatest) : 0.0f;
    shares.set(thread, share);
    const float warp_total = sum_of_lanes<32>(share);
    if (lane == 0) totals.set(warp, warp_total);
    __syncthreads();
    const float lowered = exponential(before - greatest);
    total *= lowered;
    UNROLL for (int32_t w = 0; w < WARPS; w++) total += totals.get(w);
    UNROLL for (int32_t half = 0; half < 2; half++) {
      UNROLL for (int32_t c = 0; c < 4; c++) sums[half][c] *= lowered;
    }
    for (int32_t token = warp; token < count; token += WARPS) {
      const float weight = shares.get(token);
      UNROLL for (int32_t half = 0; half < 2; half++) {
        const int32_t c = half * 128 + lane * 4;
        if (c < head_dim) {
          const float4 v = values.get((rows + base + token) * head_dim + c);
          sums[half][0] = fmaf(weight, v.x, sums[half][0]);
          sums[half][1] = fmaf(weight, v.y, sums[half][1]);
          sums[half][2] = fmaf(weight, v.z, sums[half][2]);
          sums[half][3] = fmaf(weight, v.w, sums[half][3]);
        }
      }
    }
  }
  UNROLL for (int32_t half = 0; half < 2; half++) {
    const int32_t c = half * 128 + lane * 4;
    if (c < head_dim) {
      parts.set4(warp * MOST_HEAD_DIM + c, make_float4(sums[half][0], sums[half][1], sums[half][2], sums[half][3]));
    }
  }
  __syncthreads();
  if (thread < head_dim) {
    float sum = 0.0f;
    UNROLL for (int32_t w = 0; w < WARPS; w++) sum += parts.get(w * MOST_HEAD_DIM + thread);
    y[own + thread] = sum / total;
  }
}

#define LOWBIT_ATTEND(KEYS, KEY_ROWS, KEY_TYPE, VALUES, VALUE_ROWS, VALUE_TYPE)                                      \
  KERNEL(256, 3)                                                                                                     \
  attend_##KEYS##_##VALUES(float* y, const float* queries, const KEY_TYPE* keys, const VALUE_TYPE* values,           \
                           const int32_t* position, [[maybe_unused]] int32_t tokens, int32_t heads, int32_t kv_heads, \
                           int32_t head_dim, int32_t capacity, int32_t window) {                                     \
    attend(y, queries, KEY_ROWS{keys}, VALUE_ROWS{values}, position, heads, kv_heads, head_dim, capacity, window);   \
  }

#define LOWBIT_ATTEND_BFP12(VALUES, VALUE_ROWS, VALUE_TYPE)                                                          \
  KERNEL(256, 3)                                                                                                     \
  attend_bfp12_##VALUES(float* y, const float* queries, const uint8_t* keys, const uint8_t* exponents,               \
                        const VALUE_TYPE* values, const int32_t* position, [[maybe_unused]] int32_t tokens,          \
                        int32_t heads, int32_t kv_heads, int32_t head_dim, int32_t capacity, int32_t window) {       \
    attend(y, queries, Bfp12Rows{keys, exponents}, VALUE_ROWS{values}, position, heads, kv_heads, head_dim,          \
           capacity, window);                                                                                        \
  }

LOWBIT_ATTEND(f32, PlainRows, float, f32, PlainRows, float)
LOWBIT_ATTEND(f32, PlainRows, float, f16, HalfRows, uint16_t)
LOWBIT_ATTEND(f16, HalfRows, uint16_t, f32, PlainRows, float)
LOWBIT_ATTEND(f16, HalfRows, uint16_t, f16, HalfRows, uint16_t)
LOWBIT_ATTEND_BFP12(f32, PlainRows, float)
LOWBIT_ATTEND_BFP12(f16, HalfRows, uint16_t)
