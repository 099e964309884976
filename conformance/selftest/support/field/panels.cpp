// Products with Q4_K, MXFP4 and FP8 in C++, and the casts of their activations: columns interleaved, masks of 16 bits,
// lanes, blocks two by two, tiles of registers, parts of K. The conversions of 16-bit numbers are those of kernels.cpp.
#include <algorithm>
#include <vector>

#include "kernels.cpp"

namespace {

// A block of each of eight columns of Q4_K: scales and minima by their runs, codes in turns of eight bytes.
struct Eight {
    float d[8], dmin[8];
    std::uint8_t scales[8][8], minima[8][8], codes[1024];
};

Eight interleave(const std::uint8_t *w, long first, long count, long b, long blocks) {
    Eight made = {};
    for (long c = 0; c < count; c++) {
        const std::uint8_t *block = w + ((first + c) * blocks + b) * 144;
        made.d[c] = half_at(block);
        made.dmin[c] = half_at(block + 2);
        for (int j = 0; j < 8; j++) {
            int scale, minimum;
            scale_min(j, block + 4, &scale, &minimum);
            made.scales[j][c] = static_cast<std::uint8_t>(scale);
            made.minima[j][c] = static_cast<std::uint8_t>(minimum);
        }
        for (int turn = 0; turn < 16; turn++) std::memcpy(made.codes + 64 * turn + 8 * c, block + 16 + 8 * turn, 8);
    }
    return made;
}

// The doubled elements of FP4, which are integers, and half the scale of a block.
const std::int8_t DOUBLED[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float half_scale(std::uint32_t exponent) {
    const std::uint32_t bits = exponent < 2 ? 0x00200000u << exponent : (exponent - 1) << 23;
    float number;
    std::memcpy(&number, &bits, 4);
    return number;
}

// An integer sum of a block of MXFP4 and a block of Q8_0.
int block_dot(const std::uint8_t *octets, const std::uint8_t *record) {
    const std::int8_t *q = reinterpret_cast<const std::int8_t *>(record + 2);
    int dot = 0;
    for (int i = 0; i < 16; i++) dot += DOUBLED[octets[i] & 15] * q[2 * i] + DOUBLED[octets[i] >> 4] * q[2 * i + 1];
    return dot;
}

// FP8 by the bits of float16, whose exponent has another bias.
float widened(std::uint8_t bits) { return half((bits & 0x7f) << 7 | (bits & 0x80) << 8) * 256.0f; }

}  // namespace

extern "C" {

// Q4_K times Q8_K: eight columns, interleaved before they are multiplied.
void q4_k_interleaved(const std::uint8_t *x, const std::uint8_t *w, float *y, long T, long K, long N) {
    const long blocks = K / 256;
    for (long first = 0; first < N; first += 8) {
        const long count = std::min(8L, N - first);
        std::vector<Eight> panel;
        for (long b = 0; b < blocks; b++) panel.push_back(interleave(w, first, count, b, blocks));
        for (long t = 0; t < T; t++) {
            float sums[8] = {0};
            for (long b = 0; b < blocks; b++) {
                const Eight &own = panel[b];
                const std::uint8_t *record = x + (t * blocks + b) * 292;
                const std::int8_t *q = reinterpret_cast<const std::int8_t *>(record + 4);
                float d_x;
                std::int16_t totals[16];
                std::memcpy(&d_x, record, 4);
                std::memcpy(totals, record + 260, 32);
                for (int c = 0; c < 8; c++) {
                    int products = 0, minima = 0;
                    for (int j = 0; j < 8; j++) {
                        int dot = 0;
                        for (int i = 0; i < 32; i++) {
                            const std::uint8_t octet = own.codes[64 * (4 * (j / 2) + i / 8) + 8 * c + i % 8];
                            dot += (j % 2 ? octet >> 4 : octet & 15) * q[32 * j + i];
                        }
                        products += own.scales[j][c] * dot;
                        minima += own.minima[j][c] * (totals[2 * j] + totals[2 * j + 1]);
                    }
                    sums[c] += d_x * (own.d[c] * products - own.dmin[c] * minima);
                }
            }
            for (long c = 0; c < count; c++) y[t * N + first + c] = sums[c];
        }
    }
}

// Q4_K; one vector. Four codes by the masks of a word of 16 bits, whose places are divided away at the end.
void q4_k_halves(const std::uint16_t *x, const std::uint8_t *w, std::uint16_t *y, long K, long N, int kind) {
    const long blocks = K / 256;
    for (long n = 0; n < N; n++) {
        float sum = 0;
        for (long b = 0; b < blocks; b++) {
            const std::uint8_t *block = w + (n * blocks + b) * 144;
            std::uint16_t packed[6], words[64], four[4];
            std::memcpy(packed, block + 4, 12);
            std::memcpy(words, block + 16, 128);
            for (int side = 0; side < 2; side++) {
                four[0] = packed[side] & 0x3f3f;
                four[1] = packed[2 + side] & 0x3f3f;
                four[2] = (packed[4 + side] & 0x0f0f) | (packed[side] & 0xc0c0) >> 2;
                four[3] = (packed[4 + side] >> 4 & 0x0f0f) | (packed[2 + side] & 0xc0c0) >> 2;
                std::uint8_t numbers[8];
                std::memcpy(numbers, four, 8);
                for (int upper = 0; upper < 2; upper++) {
                    const int pair = side + 2 * upper;
                    const std::uint16_t *run = x + 256 * b + 64 * pair, *own = words + 16 * pair;
                    const std::uint8_t *scale = numbers + 4 * upper, *minimum = numbers + 4 * upper + 2;
                    float dots[4] = {0}, totals[2] = {0};
                    for (int i = 0; i < 16; i++) {
                        const float a = load(run[2 * i], kind), c = load(run[2 * i + 1], kind);
                        const float e = load(run[2 * i + 32], kind), g = load(run[2 * i + 33], kind);
                        dots[0] += a * (own[i] & 0x000f);
                        dots[1] += c * (own[i] & 0x0f00);
                        dots[2] += e * (own[i] & 0x00f0);
                        dots[3] += g * (own[i] & 0xf000);
                        totals[0] += a + c;
                        totals[1] += e + g;
                    }
                    const float low = dots[0] + dots[1] / 256, high = (dots[2] + dots[3] / 256) / 16;
                    sum += half_at(block) * (low * scale[0] + high * scale[1]);
                    sum -= half_at(block + 2) * (totals[0] * minimum[0] + totals[1] * minimum[1]);
                }
            }
        }
        y[n] = store(sum, kind);
    }
}

// ggml's Q8_K: the number of largest magnitude becomes -127; with the sums of 16 codes.
void cast_q8_k(const float *x, std::uint8_t *y, long T, long K) {
    for (long b = 0; b < T * K / 256; b++) {
        const float *run = x + 256 * b;
        std::uint8_t *record = y + 292 * b;
        float extreme = 0;
        for (int i = 0; i < 256; i++)
            if (std::fabs(run[i]) > std::fabs(extreme)) extreme = run[i];
        std::memset(record, 0, 292);
        if (extreme == 0) continue;
        const float factor = -127.0f / extreme, d = 1 / factor;
        std::int16_t totals[16] = {0};
        for (int i = 0; i < 256; i++) {
            const int code = std::min(127, static_cast<int>(std::nearbyint(factor * run[i])));
            record[4 + i] = static_cast<std::uint8_t>(code);
            totals[i / 16] += code;
        }
        std::memcpy(record, &d, 4);
        std::memcpy(record + 260, totals, 32);
    }
}

// MXFP4; one vector. An element of a block is a lane.
void mxfp4_warp(const std::uint16_t *x, const std::uint8_t *elements, const std::uint8_t *scale, std::uint16_t *y,
                long K, long N, int kind) {
    for (long n = 0; n < N; n++) {
        float lanes[32] = {0};
        for (long b = 0; b < K / 32; b++) {
            const float s = half_scale(scale[n * (K / 32) + b]);
            for (int lane = 0; lane < 16; lane++) {
                const std::uint8_t octet = elements[n * (K / 2) + 16 * b + lane];
                const long k = 32 * b + 2 * lane;
                lanes[2 * lane] += load(x[k], kind) * (s * DOUBLED[octet & 15]);
                lanes[2 * lane + 1] += load(x[k + 1], kind) * (s * DOUBLED[octet >> 4]);
            }
        }
        for (int step = 16; step > 0; step /= 2)
            for (int lane = 0; lane < step; lane++) lanes[lane] += lanes[lane + step];
        y[n] = store(lanes[0], kind);
    }
}

// MXFP4 times Q8_0: blocks two by two, each with its own sum, and the one that remains.
void mxfp4_twos(const std::uint8_t *x, const std::uint8_t *elements, const std::uint8_t *scale, float *y, long T,
                long K, long N) {
    const long blocks = K / 32;
    for (long t = 0; t < T; t++)
        for (long n = 0; n < N; n++) {
            const std::uint8_t *own = elements + n * blocks * 16, *record = x + t * blocks * 34;
            const std::uint8_t *exponent = scale + n * blocks;
            float even = 0, odd = 0;
            long b = 0;
            for (; b + 1 < blocks; b += 2) {
                const int first = block_dot(own + 16 * b, record + 34 * b);
                const int second = block_dot(own + 16 * (b + 1), record + 34 * (b + 1));
                even += half_at(record + 34 * b) * half_scale(exponent[b]) * first;
                odd += half_at(record + 34 * (b + 1)) * half_scale(exponent[b + 1]) * second;
            }
            for (; b < blocks; b++)
                even += half_at(record + 34 * b) * half_scale(exponent[b]) * block_dot(own + 16 * b, record + 34 * b);
            y[t * N + n] = even + odd;
        }
}

// ggml's Q8_0: 32 codes with a float16 scale; a half is rounded away from zero.
void cast_q8_0(const float *x, std::uint8_t *y, long T, long K) {
    for (long b = 0; b < T * K / 32; b++) {
        const float *run = x + 32 * b;
        std::uint8_t *record = y + 34 * b;
        float largest = 0;
        for (int i = 0; i < 32; i++) largest = std::max(largest, std::fabs(run[i]));
        const float d = largest / 127, inverse = d != 0 ? 1 / d : 0;
        const std::uint16_t stored = to_half(d);
        std::memcpy(record, &stored, 2);
        for (int i = 0; i < 32; i++) record[2 + i] = static_cast<std::uint8_t>(std::lround(run[i] * inverse));
    }
}

// FP8 with a scale for each output: tiles of 4 tokens x 4 columns in registers.
void fp8_registers(const std::uint16_t *x, const std::uint8_t *weight, const float *scale, std::uint16_t *y, long T,
                   long K, long N, int kind) {
    for (long t = 0; t < T; t += 4)
        for (long n = 0; n < N; n += 4) {
            const long tall = std::min(4L, T - t), wide = std::min(4L, N - n);
            float sums[4][4] = {{0}};
            for (long k = 0; k < K; k++) {
                float w[4] = {0};
                for (long c = 0; c < wide; c++) w[c] = widened(weight[(n + c) * K + k]);
                for (long r = 0; r < tall; r++) {
                    const float xk = load(x[(t + r) * K + k], kind);
                    for (int c = 0; c < 4; c++) sums[r][c] += xk * w[c];
                }
            }
            for (long r = 0; r < tall; r++)
                for (long c = 0; c < wide; c++) y[(t + r) * N + n + c] = store(sums[r][c] * scale[n + c], kind);
        }
}

// FP8 with scales of blocks of 128 x 128; one vector. Four parts of K, of whole blocks, in a workspace.
void fp8_workspace(const std::uint16_t *x, const std::uint8_t *weight, const float *scales, std::uint16_t *y, long K,
                   long N, int kind) {
    const long across = (K + 127) / 128, each = (across + 3) / 4;
    std::vector<float> workspace(4 * N);
    for (long part = 0; part < 4; part++)
        for (long n = 0; n < N; n++)
            for (long b = part * each; b < std::min(across, (part + 1) * each); b++) {
                float dot = 0;
                for (long k = 128 * b; k < std::min(K, 128 * (b + 1)); k++)
                    dot += load(x[k], kind) * e4m3(weight[n * K + k]);
                workspace[part * N + n] += dot * scales[n / 128 * across + b];
            }
    for (long n = 0; n < N; n++) {
        float sum = 0;
        for (long part = 0; part < 4; part++) sum += workspace[part * N + n];
        y[n] = store(sum, kind);
    }
}

}
