// More products with stored matrices in C++: parts of K, tiles of columns, sums of x, tables of 256 numbers.
// The conversions of 16-bit numbers and of FP8 are those of kernels.cpp.
#include <algorithm>
#include <vector>

#include "kernels.cpp"

extern "C" {

// GPTQ, 4 bits, zeros stored less one; one vector. K in parts of 128 rows: each part adds to the sums of all columns.
void gptq_parts(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
                const std::uint16_t *scales, const std::int32_t *g_idx, std::uint16_t *y, long K, long N, int kind) {
    std::vector<float> sums(N);
    for (long start = 0; start < K; start += 128)
        for (long n = 0; n < N; n++) {
            float part = 0;
            for (long k = start; k < std::min(K, start + 128); k += 8) {
                const std::int32_t word = qweight[k / 8 * N + n];
                for (int i = 0; i < 8; i++) {
                    const long g = g_idx[k + i];
                    const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
                    const int code = word >> 4 * i & 15;
                    part += load(x[k + i], kind) * (half(scales[g * N + n]) * (code - zero));
                }
            }
            sums[n] += part;
        }
    for (long n = 0; n < N; n++) y[n] = store(sums[n], kind);
}

// AWQ, layout gemm: tiles of 128 columns, whose scales and zeros are decoded once for each group.
void awq_tiles(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
               const std::uint16_t *scales, std::uint16_t *y, long T, long K, long N, long group_size, int kind) {
    static const int places[8] = {0, 4, 1, 5, 2, 6, 3, 7};
    for (long t = 0; t < T; t++)
        for (long first = 0; first < N; first += 128) {
            const long wide = std::min(128L, N - first);
            float scale[128] = {0}, sums[128] = {0};
            int zero[128] = {0};
            for (long k = 0; k < K; k++) {
                const long g = k / group_size;
                if (k % group_size == 0)
                    for (long i = 0; i < wide; i++) {
                        const long n = first + i;
                        scale[i] = half(scales[g * N + n]);
                        zero[i] = qzeros[g * (N / 8) + n / 8] >> 4 * places[n % 8] & 15;
                    }
                const float xk = load(x[t * K + k], kind);
                for (long i = 0; i < wide; i++) {
                    const long n = first + i;
                    const int code = qweight[k * (N / 8) + n / 8] >> 4 * places[n % 8] & 15;
                    sums[i] += xk * (scale[i] * (code - zero[i]));
                }
            }
            for (long i = 0; i < wide; i++) y[t * N + first + i] = store(sums[i], kind);
        }
}

// Q4_K with activations that are not cast: x in float32, and its sums of 32, which meet the minima.
void q4_k_sums(const std::uint16_t *x, const std::uint8_t *w, std::uint16_t *y, long T, long K, long N, int kind) {
    std::vector<float> wide(K), totals(K / 32);
    for (long t = 0; t < T; t++) {
        std::fill(totals.begin(), totals.end(), 0.0f);
        for (long k = 0; k < K; k++) wide[k] = load(x[t * K + k], kind);
        for (long k = 0; k < K; k++) totals[k / 32] += wide[k];
        for (long n = 0; n < N; n++) {
            float sum = 0;
            for (long b = 0; b < K / 256; b++) {
                const std::uint8_t *block = w + (n * (K / 256) + b) * 144;
                const float d = half_at(block), dmin = half_at(block + 2);
                for (int j = 0; j < 8; j++) {
                    int scale, minimum;
                    float dot = 0;
                    scale_min(j, block + 4, &scale, &minimum);
                    const std::uint8_t *octets = block + 16 + 32 * (j / 2);
                    const float *run = &wide[256 * b + 32 * j];
                    for (int i = 0; i < 32; i++) dot += run[i] * (octets[i] >> 4 * (j % 2) & 15);
                    sum += d * scale * dot - dmin * minimum * totals[8 * b + j];
                }
            }
            y[t * N + n] = store(sum, kind);
        }
    }
}

// MXFP4: K in steps of 256 and what remains, four columns at once.
void mxfp4_steps(const std::uint16_t *x, const std::uint8_t *elements, const std::uint8_t *scale, std::uint16_t *y,
                 long T, long K, long N, int kind) {
    for (long t = 0; t < T; t++)
        for (long first = 0; first < N; first += 4) {
            float sums[4] = {0};
            const long count = std::min(4L, N - first);
            for (long start = 0; start < K; start += 256)
                for (long i = 0; i < count; i++) {
                    const std::uint8_t *octets = elements + (first + i) * (K / 2);
                    const std::uint8_t *exponents = scale + (first + i) * (K / 32);
                    for (long k = start; k < std::min(K, start + 256); k += 2) {
                        const float s = std::ldexp(1.0f, exponents[k / 32] - 127);
                        sums[i] += load(x[t * K + k], kind) * (s * FP4[octets[k / 2] & 15]);
                        sums[i] += load(x[t * K + k + 1], kind) * (s * FP4[octets[k / 2] >> 4]);
                    }
                }
            for (long i = 0; i < count; i++) y[t * N + first + i] = store(sums[i], kind);
        }
}

// FP8 with scales of blocks of 128 x 128; one vector. K in steps of 64, two for each scale.
void fp8_steps(const std::uint16_t *x, const std::uint8_t *weight, const float *scales, std::uint16_t *y, long K,
               long N, int kind) {
    const long across = (K + 127) / 128;
    for (long n = 0; n < N; n++) {
        const float *scale = scales + n / 128 * across;
        float sum = 0;
        for (long step = 0; 64 * step < K; step++) {
            float part = 0;
            for (long k = 64 * step; k < std::min(K, 64 * step + 64); k++)
                part += load(x[k], kind) * e4m3(weight[n * K + k]);
            sum += part * scale[step / 2];
        }
        y[n] = store(sum, kind);
    }
}

// FP8 with a scale for each output, times int8: numbers by a table, eight sums and what remains of K.
void fp8_table(const std::int8_t *x, const float *x_scale, const std::uint8_t *weight, const float *scale, float *y,
               long T, long K, long N) {
    float table[256];
    for (int code = 0; code < 256; code++) table[code] = e4m3(static_cast<std::uint8_t>(code));
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            const std::int8_t *row = x + t * K;
            const std::uint8_t *codes = weight + n * K;
            float lanes[8] = {0}, sum = 0;
            long k = 0;
            for (; k + 8 <= K; k += 8)
                for (int i = 0; i < 8; i++) lanes[i] += row[k + i] * table[codes[k + i]];
            for (; k < K; k++) sum += row[k] * table[codes[k]];
            for (int i = 0; i < 8; i++) sum += lanes[i];
            y[t * N + n] = x_scale[t] * scale[n] * sum;
        }
}

}
