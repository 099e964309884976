// Products with stored matrices as C++ kernels write them: scalar loops, and loops unrolled over several sums.
// 16-bit numbers cross as their bits; `kind` is 0 for float16 and 1 for bfloat16.
#include <cmath>
#include <cstdint>
#include <cstring>

namespace {

float half(std::uint16_t bits) {
    _Float16 number;
    std::memcpy(&number, &bits, 2);
    return static_cast<float>(number);
}

float brain(std::uint16_t bits) {
    const std::uint32_t wide = static_cast<std::uint32_t>(bits) << 16;
    float number;
    std::memcpy(&number, &wide, 4);
    return number;
}

std::uint16_t to_half(float number) {
    const _Float16 narrow = static_cast<_Float16>(number);
    std::uint16_t bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
}

std::uint16_t to_brain(float number) {
    std::uint32_t bits;
    std::memcpy(&bits, &number, 4);
    if (number != number) return static_cast<std::uint16_t>(bits >> 16 | 64);
    return static_cast<std::uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

float load(std::uint16_t bits, int kind) { return kind ? brain(bits) : half(bits); }
std::uint16_t store(float number, int kind) { return kind ? to_brain(number) : to_half(number); }

float half_at(const std::uint8_t *place) {
    std::uint16_t bits;
    std::memcpy(&bits, place, 2);
    return half(bits);
}

float e4m3(std::uint8_t bits) {
    const int exponent = bits >> 3 & 15, mantissa = bits & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp(1.0f * mantissa, -9);
    return bits & 128 ? -size : size;
}

const float FP4[16] = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

void scale_min(int j, const std::uint8_t *q, int *scale, int *minimum) {
    if (j < 4) {
        *scale = q[j] & 63;
        *minimum = q[j + 4] & 63;
    } else {
        *scale = (q[j + 4] & 15) | (q[j - 4] >> 6) << 4;
        *minimum = (q[j + 4] >> 4) | (q[j] >> 6) << 4;
    }
}

}  // namespace

extern "C" {

// GPTQ, 4 bits, zeros stored less one: a scalar loop over rows.
void gptq(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros, const std::uint16_t *scales,
          const std::int32_t *g_idx, std::uint16_t *y, long T, long K, long N, int kind) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long k = 0; k < K; k++) {
                const long g = g_idx[k];
                const int code = qweight[k / 8 * N + n] >> 4 * (k % 8) & 15;
                const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
                sum += load(x[t * K + k], kind) * (half(scales[g * N + n]) * (code - zero));
            }
            y[t * N + n] = store(sum, kind);
        }
}

// AWQ, layout gemm: unrolled over the eight columns of a word.
void awq(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros, const std::uint16_t *scales,
         std::uint16_t *y, long T, long K, long N, long group_size, int kind) {
    static const int places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (long t = 0; t < T; t++)
        for (long word = 0; word < N / 8; word++) {
            float sums[8] = {0};
            for (long k = 0; k < K; k++) {
                const long g = k / group_size;
                const float xk = load(x[t * K + k], kind);
                const std::int32_t codes = qweight[k * (N / 8) + word], zeros = qzeros[g * (N / 8) + word];
                for (int i = 0; i < 8; i++) {
                    const int shift = 4 * places[i];
                    const int difference = (codes >> shift & 15) - (zeros >> shift & 15);
                    sums[i] += xk * (half(scales[g * N + 8 * word + i]) * difference);
                }
            }
            for (int i = 0; i < 8; i++) y[t * N + 8 * word + i] = store(sums[i], kind);
        }
}

// Q4_K times Q8_K: integer sums of each run of 32 codes.
void q4_k_q8_k(const std::uint8_t *x, const std::uint8_t *w, float *y, long T, long K, long N) {
    const long blocks = K / 256;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < blocks; b++) {
                const std::uint8_t *block = w + (n * blocks + b) * 144, *activations = x + (t * blocks + b) * 292;
                const float d = half_at(block), dmin = half_at(block + 2);
                float scale_x;
                std::memcpy(&scale_x, activations, 4);
                const std::int8_t *q = reinterpret_cast<const std::int8_t *>(activations + 4);
                int products = 0, minima = 0;
                for (int j = 0; j < 8; j++) {
                    int scale, minimum, dot = 0;
                    scale_min(j, block + 4, &scale, &minimum);
                    for (int i = 0; i < 32; i++) {
                        const std::uint8_t octet = block[16 + 32 * (j / 2) + i];
                        dot += (j % 2 ? octet >> 4 : octet & 15) * q[32 * j + i];
                    }
                    std::int16_t sums[2];
                    std::memcpy(sums, activations + 260 + 4 * j, 4);
                    products += scale * dot;
                    minima += minimum * (sums[0] + sums[1]);
                }
                sum += scale_x * d * products - scale_x * dmin * minima;
            }
            y[t * N + n] = sum;
        }
}

// MXFP4: four sums at once.
void mxfp4(const std::uint16_t *x, const std::uint8_t *elements, const std::uint8_t *scale, std::uint16_t *y, long T,
           long K, long N, int kind) {
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sums[4] = {0};
            for (long b = 0; b < K / 32; b++) {
                const float s = std::ldexp(1.0f, scale[n * (K / 32) + b] - 127);
                for (int i = 0; i < 16; i += 2)
                    for (int j = 0; j < 2; j++) {
                        const std::uint8_t octet = elements[n * (K / 2) + 16 * b + i + j];
                        const long k = 32 * b + 2 * (i + j);
                        sums[2 * j] += load(x[t * K + k], kind) * (s * FP4[octet & 15]);
                        sums[2 * j + 1] += load(x[t * K + k + 1], kind) * (s * FP4[octet >> 4]);
                    }
            }
            y[t * N + n] = store((sums[0] + sums[1]) + (sums[2] + sums[3]), kind);
        }
}

// FP8 with scales of blocks of 128 x 128, applied after the sum of 128 rows.
void fp8_block(const std::uint16_t *x, const std::uint8_t *weight, const float *scales, std::uint16_t *y, long T,
               long K, long N, int kind) {
    const long across = (K + 127) / 128;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < across; b++) {
                float part = 0;
                for (long k = 128 * b; k < K && k < 128 * (b + 1); k++)
                    part += load(x[t * K + k], kind) * e4m3(weight[n * K + k]);
                sum += part * scales[n / 128 * across + b];
            }
            y[t * N + n] = store(sum, kind);
        }
}

}
