// What the processor can compute when it waits for no memory: multiply-adds on registers, twelve chains of them. And by
// the same chains, whether its cores are free.
#pragma once

#include "readers.h"

namespace lowbit::bench {

constexpr int chains = 12;  // more than latency times throughput of any multiply-add here, and as many as fit 16 registers

__attribute__((target("avx2,fma"))) inline float fma_avx2(std::int64_t steps) {
  __m256 sum[chains];
  const __m256 a = _mm256_set1_ps(0.999f), b = _mm256_set1_ps(1e-3f);
#pragma unroll
  for (int k = 0; k < chains; ++k) sum[k] = _mm256_set1_ps(k);
  for (std::int64_t i = 0; i < steps; ++i)
#pragma unroll
    for (int k = 0; k < chains; ++k) sum[k] = _mm256_fmadd_ps(sum[k], a, b);
#pragma unroll
  for (int k = 1; k < chains; ++k) sum[0] = _mm256_add_ps(sum[0], sum[k]);
  return _mm256_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f"))) inline float fma_avx512(std::int64_t steps) {
  __m512 sum[chains];
  const __m512 a = _mm512_set1_ps(0.999f), b = _mm512_set1_ps(1e-3f);
#pragma unroll
  for (int k = 0; k < chains; ++k) sum[k] = _mm512_set1_ps(k);
  for (std::int64_t i = 0; i < steps; ++i)
#pragma unroll
    for (int k = 0; k < chains; ++k) sum[k] = _mm512_fmadd_ps(sum[k], a, b);
#pragma unroll
  for (int k = 1; k < chains; ++k) sum[0] = _mm512_add_ps(sum[0], sum[k]);
  return _mm512_cvtss_f32(sum[0]);
}

__attribute__((target("avx512f,avx512vnni"))) inline float dot_vnni(std::int64_t steps) {
  __m512i sum[chains];
#pragma unroll
  for (int k = 0; k < chains; ++k) sum[k] = _mm512_set1_epi32(k);
  for (std::int64_t i = 0; i < steps; ++i)
#pragma unroll
    for (int k = 0; k < chains; ++k) sum[k] = _mm512_dpbusd_epi32(sum[k], sum[k], sum[k]);
#pragma unroll
  for (int k = 1; k < chains; ++k) sum[0] = _mm512_add_epi32(sum[0], sum[k]);
  return static_cast<float>(_mm512_cvtsi512_si32(sum[0]));
}

struct Ceiling {
  std::int64_t steps;
  int which;
  volatile float sink[64][16];
};

inline void ceiling_share(void* context, int thread) {
  Ceiling& ceiling = *static_cast<Ceiling*>(context);
  float result = 0;
  if (ceiling.which == 0) result = fma_avx2(ceiling.steps);
  if (ceiling.which == 1) result = fma_avx512(ceiling.steps);
  if (ceiling.which == 2) result = dot_vnni(ceiling.steps);
  ceiling.sink[thread % 64][0] = result;
}

// Operations a second of all threads together, a multiply-add counting two: 0 AVX2, 1 AVX-512, 2 bytes by VNNI.
inline double ceiling(Gang& gang, std::int64_t steps, int which) {
  Ceiling ceiling{steps, which, {}};
  const double lanes[] = {8, 16, 64};
  const double seconds = gang.run(ceiling_share, &ceiling);
  return 2.0 * lanes[which] * chains * steps * gang.threads() / seconds;
}

// Whether cores are free: every instruction that a core can begin in a cycle is one of these, so their time shows the
// clock, and whatever else runs on the core. Chains of arithmetic alone would not: they leave slots to the core's other
// thread, which a kernel of more instructions needs. Instructions that do nothing take the slots that are left.
struct Spin {
  std::int64_t steps;
  volatile float sink[64][16];  // a line for each thread
};

inline void spin_share(void* context, int thread) {
  Spin& spin = *static_cast<Spin*>(context);
  __m128 sum[chains];
  const __m128 a = _mm_set1_ps(0.999f), b = _mm_set1_ps(1e-3f);
#pragma unroll
  for (int k = 0; k < chains; ++k) sum[k] = _mm_set1_ps(k);
  for (std::int64_t i = 0; i < spin.steps; ++i)
#pragma unroll
    for (int k = 0; k < chains; ++k) {
      sum[k] = _mm_add_ps(_mm_mul_ps(sum[k], a), b);
      asm volatile("nop\n nop\n nop\n nop");  // six instructions together; an Ice Lake begins five, a Zen 4 six
    }
#pragma unroll
  for (int k = 1; k < chains; ++k) sum[0] = _mm_add_ps(sum[0], sum[k]);
  spin.sink[thread % 64][0] = _mm_cvtss_f32(sum[0]);
}

// Seconds in which every thread makes so many steps.
inline double spin(Gang& gang, std::int64_t steps) {
  Spin spin{steps, {}};
  return gang.run(spin_share, &spin);
}

}  // namespace lowbit::bench
