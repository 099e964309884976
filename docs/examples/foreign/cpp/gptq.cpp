// GPTQ in C++: a vector of float16 times 4-bit codes with groups, zeros and act-order, to float16.
//
//     c++ -std=c++17 -O2 -shared -fPIC -I"$(python -m lowbit_foreign)" gptq.cpp -o libgptq.so
//     lowbit conformance --library ./libgptq.so
//
// The tensors are those of GPTQModel's format gptq_v2: w = scale * (code - zero), and the group of row k is g_idx[k].
#include <array>
#include <cmath>
#include <cstdint>
#include <exception>
#include <stdexcept>

#include "lowbit.h"

namespace {

// Columns go by eights, one word of zeros at a time: a limit that `columns` declares. A weight is exact, since a scale
// has 11 bits and a code less its zero 5; so rounding is that of the sum, in float, and of the result, to float16. The
// profile is a claim, which a run of the whole suite certifies or refutes.
constexpr const char *capabilities = R"({
  "name": "gptq-cpp", "version": "1.0", "concurrent": true, "profiles": ["lowbit-1.1/gptq-v2-gemv-fp16"],
  "operations": {
    "linear.gemv": {
      "limits": {"format": ["gptq-v2"], "bits": [4], "activations": ["float16"], "result": ["float16"],
                 "columns": {"multiple": 8}},
      "arithmetic": {"form": "dequantised", "accumulator": "float32", "roundings": "any_order", "weights": "exact"}
    }
  }
})";

// float16 crosses as its bit pattern. These two are for compilers without _Float16.
float from_half(std::uint16_t bits)
{
    const int exponent = bits >> 10 & 31, mantissa = bits & 1023;
    const float size = exponent == 31 ? (mantissa ? NAN : INFINITY)
                       : exponent     ? std::ldexp(1024.0f + mantissa, exponent - 25)
                                      : std::ldexp(1.0f * mantissa, -24);
    return bits >> 15 ? -size : size;
}

std::uint16_t to_half(float number) // the nearest; of two, the even one
{
    const unsigned sign = std::signbit(number) ? 0x8000 : 0;
    const float size = std::fabs(number);
    unsigned pattern = 0x7e00; // NaN
    if (size >= 65520)         // half a step beyond the largest, 65504
        pattern = 0x7c00;
    else if (size < 0x1p-14f) // subnormal: multiples of 2^-24
        pattern = static_cast<unsigned>(std::nearbyint(size * 0x1p24f));
    else if (size == size) {
        int exponent;
        const float fraction = std::frexp(size, &exponent); // at least 1/2
        const auto mantissa = static_cast<unsigned>(std::nearbyint(fraction * 2048));
        pattern = (static_cast<unsigned>(exponent + 14) << 10) + mantissa - 1024; // 2048 carries into the exponent
    }
    return static_cast<std::uint16_t>(sign | pattern);
}

// The elements of an array argument.
template <typename T> const T *array(const lowbit_call &call, const char *path, std::int32_t dtype)
{
    const void *data = lowbit_data(&call, path, dtype);
    if (!data)
        throw std::invalid_argument(path);
    return static_cast<const T *>(data);
}

void gemv(lowbit_call &call)
{
    const std::int64_t K = lowbit_integer(&call, "weights.rows", 0), N = lowbit_integer(&call, "weights.columns", 0);
    const auto *x = array<std::uint16_t>(call, "x", LOWBIT_FLOAT16);                   // K
    const auto *qweight = array<std::uint32_t>(call, "weights.qweight", LOWBIT_INT32); // K/8 x N: 8 rows in a word
    const auto *qzeros = array<std::uint32_t>(call, "weights.qzeros", LOWBIT_INT32);   // groups x N/8: 8 columns
    const auto *scales = array<std::uint16_t>(call, "weights.scales", LOWBIT_FLOAT16); // groups x N
    const auto *g_idx = array<std::int32_t>(call, "weights.g_idx", LOWBIT_INT32);      // K
    auto *y = static_cast<std::uint16_t *>(call.result(&call, "result", LOWBIT_ARRAY, LOWBIT_FLOAT16, 1, &N));
    if (!y)
        throw std::runtime_error("the caller has no memory for the result");
    for (std::int64_t n = 0; n < N; n += 8) {
        std::array<float, 8> sums{};
        for (std::int64_t k = 0; k < K; ++k) {
            const float x_k = from_half(x[k]);
            const std::int64_t group = g_idx[k];
            const std::uint32_t *words = qweight + k / 8 * N + n, zeros = qzeros[group * (N / 8) + n / 8];
            for (unsigned j = 0; j < 8; ++j) {
                const auto code = static_cast<int>(words[j] >> k % 8 * 4 & 15);
                const auto zero = static_cast<int>(zeros >> 4 * j & 15);
                sums[j] += x_k * (from_half(scales[group * N + n + j]) * static_cast<float>(code - zero));
            }
        }
        for (unsigned j = 0; j < 8; ++j)
            y[n + j] = to_half(sums[j]);
    }
}

} // namespace

std::uint32_t lowbit_abi_version() { return LOWBIT_ABI; }

const char *lowbit_capabilities() { return capabilities; }

std::int32_t lowbit_run(lowbit_call *call)
{
    try { // no exception may leave the library: it becomes a status and a message
        gemv(*call);
        return LOWBIT_OK;
    } catch (const std::exception &error) {
        return lowbit_say(call, LOWBIT_FAILED, error.what());
    }
}
