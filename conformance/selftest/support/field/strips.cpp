// More products with stored matrices in C++: rows in the order of their groups, split K, masks of words, pairs, shifts.
// The conversions of 16-bit numbers are those of kernels.cpp.
#include <algorithm>
#include <vector>

#include "kernels.cpp"

namespace {

// The bits of FP8 as those of float16, whose exponent has a bias greater by 8.
float shifted(std::uint8_t bits) {
    if ((bits & 127) == 127) return NAN;
    return half(static_cast<std::uint16_t>((bits & 128) << 8 | (bits & 127) << 7)) * 256.0f;
}

}  // namespace

extern "C" {

// GPTQ, 4 bits, zeros stored less one; one vector. Rows, and x with them, are put into the order of their groups.
void gptq_sorted(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
                 const std::uint16_t *scales, const std::int32_t *g_idx, std::uint16_t *y, long K, long N, long groups,
                 int kind) {
    std::vector<long> start(groups + 1), rows(K);
    for (long k = 0; k < K; k++) start[g_idx[k] + 1]++;
    for (long g = 0; g < groups; g++) start[g + 1] += start[g];
    std::vector<long> next(start);
    for (long k = 0; k < K; k++) rows[next[g_idx[k]]++] = k;
    std::vector<float> gathered(K);
    for (long i = 0; i < K; i++) gathered[i] = load(x[rows[i]], kind);
    for (long n = 0; n < N; n++) {
        float sum = 0;
        for (long g = 0; g < groups; g++) {
            const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
            float part = 0;
            for (long i = start[g]; i < start[g + 1]; i++) {
                const int code = qweight[rows[i] / 8 * N + n] >> 4 * (rows[i] % 8) & 15;
                part += gathered[i] * (code - zero);
            }
            sum += half(scales[g * N + n]) * part;
        }
        y[n] = store(sum, kind);
    }
}

// AWQ, layout gemm; one vector. Three parts of K, each with its own sums, which are added at the end.
void awq_split(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
               const std::uint16_t *scales, std::uint16_t *y, long K, long N, long group_size, int kind) {
    static const int shifts[8] = {0, 16, 4, 20, 8, 24, 12, 28};
    const long each = (K / group_size + 2) / 3 * group_size;
    std::vector<float> sums(3 * N);
    for (long part = 0; part < 3; part++)
        for (long k = part * each; k < std::min(K, (part + 1) * each); k++) {
            const long g = k / group_size;
            const float xk = load(x[k], kind);
            for (long n = 0; n < N; n++) {
                const int shift = shifts[n % 8];
                const int code = qweight[k * (N / 8) + n / 8] >> shift & 15;
                const int zero = qzeros[g * (N / 8) + n / 8] >> shift & 15;
                sums[part * N + n] += xk * (half(scales[g * N + n]) * (code - zero));
            }
        }
    for (long n = 0; n < N; n++) y[n] = store(sums[n] + sums[N + n] + sums[2 * N + n], kind);
}

// Q4_K times Q8_K: four scales or minima at once by masks of words, and eight integer sums of products.
void q4_k_words(const std::uint8_t *x, const std::uint8_t *w, float *y, long T, long K, long N) {
    const std::uint32_t low = 0x3f3f3f3f, high = 0x03030303, nibbles = 0x0f0f0f0f;
    const long blocks = K / 256;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < blocks; b++) {
                const std::uint8_t *block = w + (n * blocks + b) * 144, *activations = x + (t * blocks + b) * 292;
                std::uint32_t packed[3], words[4];
                std::memcpy(packed, block + 4, 12);
                words[0] = packed[0] & low;
                words[1] = (packed[2] & nibbles) | (packed[0] >> 6 & high) << 4;
                words[2] = packed[1] & low;
                words[3] = (packed[2] >> 4 & nibbles) | (packed[1] >> 6 & high) << 4;
                std::uint8_t scale[8], minimum[8];
                std::memcpy(scale, words, 8);
                std::memcpy(minimum, words + 2, 8);
                float d_x;
                std::int16_t sums[16];
                std::memcpy(&d_x, activations, 4);
                std::memcpy(sums, activations + 260, 32);
                const std::int8_t *q = reinterpret_cast<const std::int8_t *>(activations + 4);
                int lanes[8] = {0}, products = 0, minima = 0;
                for (int j = 0; j < 8; j++)
                    for (int i = 0; i < 32; i++) {
                        const int code = block[16 + 32 * (j / 2) + i] >> 4 * (j % 2) & 15;
                        lanes[i % 8] += scale[j] * (code * q[32 * j + i]);
                    }
                for (int i = 0; i < 8; i++) products += lanes[i];
                for (int s = 0; s < 16; s++) minima += minimum[s / 2] * sums[s];
                sum += d_x * half_at(block) * products - d_x * half_at(block + 2) * minima;
            }
            y[t * N + n] = sum;
        }
}

// MXFP4: two elements by a table of bytes, and scales by the bits of float32.
void mxfp4_pairs(const std::uint16_t *x, const std::uint8_t *elements, const std::uint8_t *scale, std::uint16_t *y,
                 long T, long K, long N, int kind) {
    float pairs[256][2];
    for (int octet = 0; octet < 256; octet++) {
        pairs[octet][0] = FP4[octet & 15];
        pairs[octet][1] = FP4[octet >> 4];
    }
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < K / 32; b++) {
                const std::uint32_t exponent = scale[n * (K / 32) + b];
                const std::uint32_t bits = exponent ? exponent << 23 : 0x00400000;
                float s;
                std::memcpy(&s, &bits, 4);
                for (long k = 32 * b; k < 32 * b + 32; k += 2) {
                    const float *pair = pairs[elements[(n * K + k) / 2]];
                    sum += load(x[t * K + k], kind) * (s * pair[0]);
                    sum += load(x[t * K + k + 1], kind) * (s * pair[1]);
                }
            }
            y[t * N + n] = store(sum, kind);
        }
}

// FP8 with scales of blocks of 128 x 128: numbers by shifts, blocks of K in the outer loop, 64 columns at once.
void fp8_shifted(const std::uint16_t *x, const std::uint8_t *weight, const float *scales, std::uint16_t *y, long T,
                 long K, long N, int kind) {
    const long across = (K + 127) / 128;
    for (long t = 0; t < T; t++)
        for (long first = 0; first < N; first += 64) {
            const long count = std::min(64L, N - first);
            float sums[64] = {0};
            for (long b = 0; b < across; b++)
                for (long i = 0; i < count; i++) {
                    float part = 0;
                    for (long k = 128 * b; k < std::min(K, 128 * b + 128); k++)
                        part += load(x[t * K + k], kind) * shifted(weight[(first + i) * K + k]);
                    sums[i] += part * scales[first / 128 * across + b];
                }
            for (long i = 0; i < count; i++) y[t * N + first + i] = store(sums[i], kind);
        }
}

}
