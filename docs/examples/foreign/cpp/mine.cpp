// A backend in C++: packing and unpacking of codes, and one product with 4-bit weights.
//
//     c++ -std=c++17 -O2 -shared -fPIC -I"$(python -m lowbit_foreign)" mine.cpp -o libmine.so
//     lowbit conformance --library ./libmine.so
#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <stdexcept>
#include <string_view>
#include <vector>

#include "lowbit.h"

namespace {

constexpr const char *capabilities = R"({
  "name": "mine-cpp", "version": "1.0", "concurrent": true,
  "operations": {
    "packing.pack": {},
    "packing.unpack": {},
    "linear.qgemv": {
      "limits": {"bits": [4], "convention": ["minimum"], "scale_dtype": ["float32"]},
      "arithmetic": {"form": "dequantised", "accumulator": "float32", "roundings": "any_order"}
    }
  }
})";

// The C++ type of an element and its number in lowbit.h.
template <typename T> constexpr std::int32_t dtype = LOWBIT_NO_DTYPE;
template <> constexpr std::int32_t dtype<std::uint8_t> = LOWBIT_UINT8;
template <> constexpr std::int32_t dtype<std::uint32_t> = LOWBIT_UINT32;
template <> constexpr std::int32_t dtype<float> = LOWBIT_FLOAT32;

// Rows and columns of somebody else's memory; a vector is a single row.
template <typename T> struct view {
    T *data;
    std::int64_t rows, columns;
    T *operator[](std::int64_t row) const { return data + row * columns; }
};

template <typename T> view<const T> argument(const lowbit_call &call, const char *path)
{
    const lowbit_value *value = lowbit_argument(&call, path);
    if (!value || value->kind != LOWBIT_ARRAY || value->dtype != dtype<T> || value->ndim < 1 || value->ndim > 2)
        throw std::invalid_argument(path);
    const std::int64_t rows = value->ndim == 2 ? value->shape[0] : 1;
    return {static_cast<const T *>(value->data), rows, value->shape[value->ndim - 1]};
}

// The memory that the caller hands out for the result.
template <typename T> view<T> result(lowbit_call &call, std::vector<std::int64_t> shape)
{
    const auto dimensions = static_cast<std::int32_t>(shape.size());
    void *data = call.result(&call, "result", LOWBIT_ARRAY, dtype<T>, dimensions, shape.data());
    if (!data)
        throw std::runtime_error("the caller has no memory for the result");
    return {static_cast<T *>(data), dimensions == 2 ? shape[0] : 1, shape.back()};
}

// Each column is one stream of bits, least significant first; a code of 3 bits may begin in one word and end in the
// next.
void pack(lowbit_call &call)
{
    const auto codes = argument<std::uint8_t>(call, "codes");
    const std::int64_t bits = lowbit_integer(&call, "bits", 0);
    const auto words = result<std::uint32_t>(call, {codes.rows * bits / 32, codes.columns});
    std::fill_n(words.data, words.rows * words.columns, 0u);
    for (std::int64_t k = 0; k < codes.rows; ++k) {
        const std::int64_t word = k * bits / 32, shift = k * bits % 32;
        for (std::int64_t n = 0; n < codes.columns; ++n) {
            const std::uint64_t code = std::uint64_t{codes[k][n]} << shift;
            words[word][n] |= static_cast<std::uint32_t>(code);
            if (shift + bits > 32)
                words[word + 1][n] |= static_cast<std::uint32_t>(code >> 32);
        }
    }
}

void unpack(lowbit_call &call)
{
    const auto words = argument<std::uint32_t>(call, "words");
    const std::int64_t bits = lowbit_integer(&call, "bits", 1);
    const auto codes = result<std::uint8_t>(call, {words.rows * 32 / bits, words.columns});
    for (std::int64_t k = 0; k < codes.rows; ++k) {
        const std::int64_t word = k * bits / 32, shift = k * bits % 32;
        for (std::int64_t n = 0; n < codes.columns; ++n) {
            std::uint64_t code = words[word][n];
            if (shift + bits > 32)
                code |= std::uint64_t{words[word + 1][n]} << 32;
            codes[k][n] = static_cast<std::uint8_t>(code >> shift & ((1u << bits) - 1));
        }
    }
}

// Weights are made ready once. This copies them, for the caller's arrays may not be used after the call; a real kernel
// would put them into an order of its own here.
class matrix {
  public:
    explicit matrix(const lowbit_call &call)
        : rows_(lowbit_integer(&call, "matrix.rows", 0)), group_size_(lowbit_integer(&call, "matrix.group_size", 1)),
          columns_(lowbit_size(&call, "matrix.words", 1)), words_(copy<std::uint32_t>(call, "matrix.words")),
          scales_(copy<float>(call, "matrix.scales")), minima_(copy<float>(call, "matrix.zeros"))
    {
    }

    // y = x W with w = scale * code + minimum, one row of W at a time: each y is a sum of `rows` products in float,
    // which is what `dequantised`, `float32` and `any_order` declare.
    void multiply(lowbit_call &call) const
    {
        const float *x = argument<float>(call, "x").data;
        float *y = result<float>(call, {columns_}).data;
        std::fill_n(y, columns_, 0.0f);
        for (std::int64_t k = 0; k < rows_; ++k) {
            const std::uint32_t *words = words_.data() + k / 8 * columns_;
            const float *scale = scales_.data() + k / group_size_ * columns_;
            const float *minimum = minima_.data() + k / group_size_ * columns_;
            for (std::int64_t n = 0; n < columns_; ++n) {
                const auto code = static_cast<float>(words[n] >> k % 8 * 4 & 15);
                y[n] += x[k] * (scale[n] * code + minimum[n]);
            }
        }
    }

  private:
    template <typename T> static std::vector<T> copy(const lowbit_call &call, const char *path)
    {
        const auto given = argument<T>(call, path);
        return {given.data, given.data + given.rows * given.columns};
    }

    std::int64_t rows_, group_size_, columns_;
    std::vector<std::uint32_t> words_;
    std::vector<float> scales_, minima_;
};

// No exception may leave the library: it becomes a status and a message.
template <typename Work> std::int32_t guarded(lowbit_call *call, Work work)
{
    try {
        return work();
    } catch (const std::exception &error) {
        return lowbit_say(call, LOWBIT_FAILED, error.what());
    }
}

} // namespace

std::uint32_t lowbit_abi_version() { return LOWBIT_ABI; }

const char *lowbit_capabilities() { return capabilities; }

std::int32_t lowbit_prepare(lowbit_call *call, void **handle)
{
    return guarded(call, [&] {
        *handle = std::make_unique<matrix>(*call).release();
        return LOWBIT_OK;
    });
}

void lowbit_release(void *handle) { delete static_cast<matrix *>(handle); }

std::int32_t lowbit_run(lowbit_call *call)
{
    return guarded(call, [&] {
        const std::string_view operation = call->operation;
        if (operation == "packing.pack")
            pack(*call);
        else if (operation == "packing.unpack")
            unpack(*call);
        else if (operation == "linear.qgemv")
            static_cast<const matrix *>(call->handle)->multiply(*call);
        else
            return LOWBIT_NOT_DECLARED;
        return LOWBIT_OK;
    });
}
