// More products with stored matrices in C++: tiles with remainders, activations of 8 bits, layouts along K.
// The conversions of 16-bit numbers and of FP8 are those of kernels.cpp.
#include <algorithm>
#include <vector>

#include "kernels.cpp"

namespace {

// The doubled elements of FP4, which are integers.
const std::int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

// A product of one row of x and one of w: sixteen sums, and what remains of K.
float dot(const std::uint16_t *x, const std::uint8_t *w, long K, int kind) {
    float lanes[16] = {0}, total = 0;
    long k = 0;
    for (; k + 16 <= K; k += 16)
        for (int i = 0; i < 16; i++) lanes[i] += load(x[k + i], kind) * e4m3(w[k + i]);
    for (; k < K; k++) total += load(x[k], kind) * e4m3(w[k]);
    for (int i = 0; i < 16; i++) total += lanes[i];
    return total;
}

}  // namespace

extern "C" {

// GPTQ, 4 bits, zeros stored less one: a weight is decoded once for four tokens.
void gptq_tiled(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
                const std::uint16_t *scales, const std::int32_t *g_idx, std::uint16_t *y, long T, long K, long N,
                int kind) {
    for (long t = 0; t < T; t += 4) {
        const long count = std::min(4L, T - t);
        for (long n = 0; n < N; n++) {
            float sums[4] = {0};
            for (long k = 0; k < K; k++) {
                const long g = g_idx[k];
                const int code = qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;
                const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
                const float weight = half(scales[g * N + n]) * (code - zero);
                for (long i = 0; i < count; i++) sums[i] += load(x[(t + i) * K + k], kind) * weight;
            }
            for (long i = 0; i < count; i++) y[(t + i) * N + n] = store(sums[i], kind);
        }
    }
}

// GPTQ of 4 bits times int8: an integer sum for each group, scaled at the end.
void gptq_int8(const std::int8_t *x, const float *x_scale, const std::int32_t *qweight, const std::int32_t *qzeros,
               const std::uint16_t *scales, const std::int32_t *g_idx, float *y, long T, long K, long N, long groups) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            std::vector<int> sums(groups);
            for (long k = 0; k < K; k++) {
                const long g = g_idx[k];
                const int code = qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;
                const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
                sums[g] += (code - zero) * x[t * K + k];
            }
            float total = 0;
            for (long g = 0; g < groups; g++) total += half(scales[g * N + n]) * sums[g];
            y[t * N + n] = x_scale[t] * total;
        }
}

// AWQ, layout gemm, times int8: the zero of a group meets the sum of its codes of x.
void awq_int8(const std::int8_t *x, const float *x_scale, const std::int32_t *qweight, const std::int32_t *qzeros,
              const std::uint16_t *scales, float *y, long T, long K, long N, long group_size) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            const int place = 4 * (n % 8 / 2) + 16 * (n % 2);
            float sum = 0;
            for (long g = 0; g < K / group_size; g++) {
                const int zero = qzeros[g * (N / 8) + n / 8] >> place & 15;
                int products = 0;
                int total = 0;
                for (long k = g * group_size; k < (g + 1) * group_size; k++) {
                    const int code = qweight[k * (N / 8) + n / 8] >> place & 15;
                    products += code * x[t * K + k];
                    total += x[t * K + k];
                }
                sum += half(scales[g * N + n]) * (products - zero * total);
            }
            y[t * N + n] = x_scale[t] * sum;
        }
}

// AWQ, layout gemv: words along K, and zeros and scales in rows that are padded to 1024 rows of K.
void awq_vector(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
                const std::uint16_t *scales, std::uint16_t *y, long K, long N, long group_size, int kind) {
    const long padded = (K + 1023) / 1024 * 1024 / group_size;
    for (long n = 0; n < N; n++) {
        float sum = 0;
        for (long g = 0; g < (K + group_size - 1) / group_size; g++) {
            const float scale = half(scales[n * padded + g]);
            const int zero = qzeros[n * (padded / 8) + g / 8] >> 4 * (g % 8) & 15;
            float part = 0;
            for (long k = g * group_size; k < std::min(K, (g + 1) * group_size); k++)
                part += load(x[k], kind) * ((qweight[n * (K / 8) + k / 8] >> 4 * (k % 8) & 15) - zero);
            sum += scale * part;
        }
        y[n] = store(sum, kind);
    }
}

// Q4_K with activations that are not cast: block after block, into the sums of all columns.
void q4_k(const std::uint16_t *x, const std::uint8_t *w, std::uint16_t *y, long T, long K, long N, int kind) {
    const long blocks = K / 256;
    std::vector<float> sums(N);
    for (long t = 0; t < T; t++) {
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (long b = 0; b < blocks; b++)
            for (long n = 0; n < N; n++) {
                const std::uint8_t *block = w + (n * blocks + b) * 144;
                const float d = half_at(block), dmin = half_at(block + 2);
                for (int j = 0; j < 8; j++) {
                    int scale, minimum;
                    scale_min(j, block + 4, &scale, &minimum);
                    for (int i = 0; i < 32; i++) {
                        const int octet = block[16 + 32 * (j / 2) + i], code = j % 2 ? octet >> 4 : octet & 15;
                        const float weight = d * scale * code - dmin * minimum;
                        sums[n] += load(x[t * K + 256 * b + 32 * j + i], kind) * weight;
                    }
                }
            }
        for (long n = 0; n < N; n++) y[t * N + n] = store(sums[n], kind);
    }
}

// MXFP4 times Q8_0: integer sums of doubled elements, with half the scale.
void mxfp4_q8_0(const std::uint8_t *x, const std::uint8_t *elements, const std::uint8_t *scale, float *y, long T,
                long K, long N) {
    const long blocks = K / 32;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < blocks; b++) {
                const std::uint8_t *record = x + (t * blocks + b) * 34, *octets = elements + (n * blocks + b) * 16;
                const std::int8_t *q = reinterpret_cast<const std::int8_t *>(record + 2);
                int dot = 0;
                for (int i = 0; i < 16; i++)
                    dot += DOUBLED[octets[i] & 15] * q[2 * i] + DOUBLED[octets[i] >> 4] * q[2 * i + 1];
                sum += std::ldexp(half_at(record) * dot, scale[n * blocks + b] - 128);
            }
            y[t * N + n] = sum;
        }
}

// MXFP4 times int8: integer sums of doubled elements, halved.
void mxfp4_int8(const std::int8_t *x, const float *x_scale, const std::uint8_t *elements, const std::uint8_t *scale,
                float *y, long T, long K, long N) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < K / 32; b++) {
                int dot = 0;
                for (int i = 0; i < 32; i++) {
                    const std::uint8_t octet = elements[n * (K / 2) + 16 * b + i / 2];
                    dot += DOUBLED[i % 2 ? octet >> 4 : octet & 15] * x[t * K + 32 * b + i];
                }
                sum += std::ldexp(dot / 2.0f, scale[n * (K / 32) + b] - 127);
            }
            y[t * N + n] = x_scale[t] * sum;
        }
}

// FP8 with a scale for each output: four tokens at once, and those that remain one by one.
void fp8_tiled(const std::uint16_t *x, const std::uint8_t *weight, const float *scale, std::uint16_t *y, long T,
               long K, long N, int kind) {
    long t = 0;
    for (; t + 4 <= T; t += 4)
        for (long n = 0; n < N; n++)
            for (long i = 0; i < 4; i++)
                y[(t + i) * N + n] = store(scale[n] * dot(x + (t + i) * K, weight + n * K, K, kind), kind);
    for (; t < T; t++)
        for (long n = 0; n < N; n++)
            y[t * N + n] = store(scale[n] * dot(x + t * K, weight + n * K, K, kind), kind);
}

// FP8 with scales of blocks of 128 x 128, times int8.
void fp8_block_int8(const std::int8_t *x, const float *x_scale, const std::uint8_t *weight, const float *scales,
                    float *y, long T, long K, long N) {
    const long across = (K + 127) / 128;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < across; b++) {
                float part = 0;
                for (long k = 128 * b; k < std::min(K, 128 * (b + 1)); k++)
                    part += x[t * K + k] * e4m3(weight[n * K + k]);
                sum += scales[n / 128 * across + b] * part;
            }
            y[t * N + n] = x_scale[t] * sum;
        }
}

}
