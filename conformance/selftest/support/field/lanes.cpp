// Products with GPTQ and AWQ in C++, in the ways of GPU kernels: lanes whose sums meet in a tree, panels that are packed
// before the product, tables of partial sums. The conversions of 16-bit numbers are those of kernels.cpp.
#include <algorithm>
#include <numeric>
#include <vector>

#include "kernels.cpp"

namespace {

// The place of each column in a word of AWQ's layout gemm.
const int PLACES[8] = {0, 16, 4, 20, 8, 24, 12, 28};

// The sum of 32 lanes, in halves, as a warp adds by shuffles.
float warp_sum(float *lanes) {
    for (int step = 16; step > 0; step /= 2)
        for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
    return lanes[0];
}

// GPTQ once it is packed: rows in the order of their groups, panels of 8 columns, codes less their zeros.
struct Panels {
    std::vector<long> order;
    std::vector<std::int8_t> numbers;
};

Panels pack(const std::int32_t *qweight, const std::int32_t *qzeros, const std::int32_t *g_idx, long K, long N) {
    Panels made{std::vector<long>(K), std::vector<std::int8_t>(K * N)};
    std::iota(made.order.begin(), made.order.end(), 0L);
    std::stable_sort(made.order.begin(), made.order.end(), [=](long a, long b) { return g_idx[a] < g_idx[b]; });
    for (long panel = 0; panel < N / 8; panel++)
        for (long i = 0; i < K; i++) {
            const long k = made.order[i];
            const std::uint32_t zeros = qzeros[g_idx[k] * (N / 8) + panel];
            for (int c = 0; c < 8; c++) {
                const std::uint32_t word = qweight[k / 8 * N + 8 * panel + c];
                const int code = word >> 4 * (k % 8) & 15;
                const int zero = (zeros >> 4 * c & 15) + 1;
                made.numbers[(panel * K + i) * 8 + c] = static_cast<std::int8_t>(code - zero);
            }
        }
    return made;
}

}  // namespace

extern "C" {

// GPTQ, 4 bits, zeros stored less one; one vector. Each of 32 lanes takes every 32nd word of a column.
void gptq_warp(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
               const std::uint16_t *scales, const std::int32_t *g_idx, std::uint16_t *y, long K, long N, int kind) {
    const long words = K / 8;
    for (long n = 0; n < N; n++) {
        float lanes[32] = {0};
        for (long first = 0; first < words; first += 32)
            for (long lane = 0; lane < std::min(32L, words - first); lane++) {
                const long word = first + lane;
                std::uint32_t packed = qweight[word * N + n];
                float part = 0;
                for (int i = 0; i < 8; i++) {
                    const long k = 8 * word + i, g = g_idx[k];
                    const int zero = (qzeros[g * (N / 8) + n / 8] >> 4 * (n % 8) & 15) + 1;
                    const int code = packed & 15;
                    part += load(x[k], kind) * (half(scales[g * N + n]) * (code - zero));
                    packed >>= 4;
                }
                lanes[lane] += part;
            }
        y[n] = store(warp_sum(lanes), kind);
    }
}

// GPTQ, 4 bits, zeros stored less one: packed first, then tiles of 4 tokens x 8 columns.
void gptq_panels(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
                 const std::uint16_t *scales, const std::int32_t *g_idx, std::uint16_t *y, long T, long K, long N,
                 int kind) {
    const Panels packed = pack(qweight, qzeros, g_idx, K, N);
    for (long panel = 0; panel < N / 8; panel++)
        for (long t = 0; t < T; t += 4) {
            const long count = std::min(4L, T - t);
            float sums[4][8] = {{0}};
            for (long i = 0; i < K; i++) {
                const long k = packed.order[i];
                const std::uint16_t *own = scales + g_idx[k] * N + 8 * panel;
                const std::int8_t *numbers = &packed.numbers[(panel * K + i) * 8];
                for (long r = 0; r < count; r++) {
                    const float xk = load(x[(t + r) * K + k], kind);
                    for (int c = 0; c < 8; c++) sums[r][c] += xk * (half(own[c]) * numbers[c]);
                }
            }
            for (long r = 0; r < count; r++)
                for (int c = 0; c < 8; c++) y[(t + r) * N + 8 * panel + c] = store(sums[r][c], kind);
        }
}

// AWQ, layout gemm; one vector. Eight columns at once, row k in lane k % 32; a zero is an offset of the weights.
void awq_warp(const std::uint16_t *x, const std::int32_t *qweight, const std::int32_t *qzeros,
              const std::uint16_t *scales, std::uint16_t *y, long K, long N, long group_size, int kind) {
    for (long word = 0; word < N / 8; word++) {
        float lanes[8][32] = {{0}};
        for (long g = 0; g < K / group_size; g++) {
            float scale[8], offset[8];
            const std::int32_t zeros = qzeros[g * (N / 8) + word];
            for (int c = 0; c < 8; c++) {
                scale[c] = half(scales[g * N + 8 * word + c]);
                offset[c] = -scale[c] * (zeros >> PLACES[c] & 15);
            }
            for (long k = g * group_size; k < (g + 1) * group_size; k++) {
                const float xk = load(x[k], kind);
                const std::int32_t codes = qweight[k * (N / 8) + word];
                for (int c = 0; c < 8; c++) lanes[c][k % 32] += xk * (scale[c] * (codes >> PLACES[c] & 15) + offset[c]);
            }
        }
        for (int c = 0; c < 8; c++) y[8 * word + c] = store(warp_sum(lanes[c]), kind);
    }
}

// AWQ, layout gemm, times int8, by tables: four rows of x have 16 sums, which the four bits of their codes look up.
void awq_lookup(const std::int8_t *x, const float *x_scale, const std::int32_t *qweight, const std::int32_t *qzeros,
                const std::uint16_t *scales, float *y, long T, long K, long N, long group_size) {
    std::vector<int> table(4 * K);
    for (long t = 0; t < T; t++) {
        for (long q = 0; q < K / 4; q++)
            for (int pattern = 0; pattern < 16; pattern++) {
                int sum = 0;
                for (int i = 0; i < 4; i++) sum += (pattern >> i & 1) * x[t * K + 4 * q + i];
                table[16 * q + pattern] = sum;
            }
        for (long n = 0; n < N; n++) {
            float total = 0;
            for (long g = 0; g < K / group_size; g++) {
                const int zero = qzeros[g * (N / 8) + n / 8] >> PLACES[n % 8] & 15;
                int dot = 0, whole = 0;
                for (long q = g * group_size / 4; q < (g + 1) * group_size / 4; q++) {
                    int patterns[4] = {0};
                    for (int i = 0; i < 4; i++) {
                        const int code = qweight[(4 * q + i) * (N / 8) + n / 8] >> PLACES[n % 8] & 15;
                        for (int bit = 0; bit < 4; bit++) patterns[bit] |= (code >> bit & 1) << i;
                    }
                    for (int bit = 0; bit < 4; bit++) dot += table[16 * q + patterns[bit]] * (1 << bit);
                    whole += table[16 * q + 15];
                }
                total += half(scales[g * N + n]) * (dot - zero * whole);
            }
            y[t * N + n] = x_scale[t] * total;
        }
    }
}

}
