// Casts against exact roundings, for the bit patterns of float32 in a range, or for one in `step` of them.
//
// A cast takes the header's own function; of FP8 the results of the specification are given. What a cast should give is
// found in float64, which holds every number here exactly: by a search among the values of the type, or by a rounding to
// an integer. Each function gives the first pattern for which the two differ, or -1.
#include <cfenv>

#include "casts.h"
#include "blocks.h"

namespace {

// The patterns first, first + step, … below end.
struct Range {
  std::uint64_t first, end, step;
};

template <class Right> std::int64_t first_wrong(Range range, const Right& right) {
  for (std::uint64_t bits = range.first; bits < range.end; bits += range.step)
    if (!right(static_cast<std::uint32_t>(bits))) return static_cast<std::int64_t>(bits);
  return -1;
}

// The pattern of a magnitude among `count` ascending values: the nearest, of two equally near ones the even pattern.
// `middles[i]` lies between value i and value i + 1. Magnitudes mostly ascend, as patterns of float32 do, so the search
// begins where the one before has ended.
class Nearest {
 public:
  Nearest(const double* middles, std::int64_t count) : middles_(middles), count_(count) {}

  std::uint32_t operator()(double magnitude) {
    while (i_ < count_ - 1 && above(i_, magnitude)) ++i_;
    while (i_ > 0 && !above(i_ - 1, magnitude)) --i_;
    return static_cast<std::uint32_t>(i_);
  }

 private:
  bool above(std::int64_t i, double magnitude) const {
    return magnitude > middles_[i] || (magnitude == middles_[i] && i % 2 == 1);
  }

  const double* middles_;
  std::int64_t count_, i_ = 0;
};

// Numbers of a block beside its largest.
constexpr std::int64_t beside = lowbit::activation_block - 1;

bool is_nan(std::uint32_t bits) { return (bits & 0x7FFFFFFFu) > 0x7F800000u; }

// Types of 16 bits, whose last value is infinity.
template <class Narrow>
std::int64_t narrowed(const double* middles, std::int64_t count, Range range, const Narrow& narrow) {
  Nearest nearest(middles, count);
  return first_wrong(range, [&](std::uint32_t bits) {
    const float x = lowbit::from_bits(bits);
    const std::uint32_t given = narrow(x), sign = bits >> 31 << 15;
    if (is_nan(bits)) return (given & 0x7FFFu) > static_cast<std::uint32_t>(count - 1);
    return given == (sign | nearest(std::fabs(static_cast<double>(x))));
  });
}

// The mantissa and the exponent of an element of a block, by the definition (lowbit.quantization.bfp.cast).
std::int64_t block_exponent(double largest, int mantissa, int reach) {
  int power;
  std::frexp(largest, &power);
  return largest == 0 ? -reach : std::min(std::max(power - 1 - (mantissa - 2), -reach), reach);
}

bool right_mantissa(double x, std::int64_t e, int top, int given) {
  const double exact = std::nearbyint(std::ldexp(x, static_cast<int>(-e)));
  return given == std::min(std::max(exact, -static_cast<double>(top)), static_cast<double>(top));
}

bool finite(float x) { return std::isfinite(x); }

}  // namespace

extern "C" {

std::int64_t wrong_half(const double* middles, std::int64_t count, Range range) {
  return narrowed(middles, count, range, lowbit::narrow_half);
}

std::int64_t wrong_brain(const double* middles, std::int64_t count, Range range) {
  return narrowed(middles, count, range, lowbit::narrow_brain);
}

// Activations: x as the largest of its block, and x beside a largest number L of a block with the exponent 0.
std::int64_t wrong_blocks(const double*, std::int64_t, Range range) {
  return first_wrong(range, [](std::uint32_t bits) {
    const float L = lowbit::from_bits(0x42FFFFFFu), x = lowbit::from_bits(bits);  // L: below 128
    if (!finite(x)) return true;
    std::int8_t mantissas[2];
    std::int16_t exponent;
    lowbit::cast_blocks(&x, 1, mantissas, &exponent);
    const std::int64_t e = block_exponent(std::fabs(static_cast<double>(x)), 8, 127);
    if (exponent != e || !right_mantissa(x, e, 127, mantissas[0])) return false;
    if (std::fabs(x) > L) return true;
    const float pair[2] = {L, x};
    lowbit::cast_blocks(pair, 2, mantissas, &exponent);
    return exponent == 0 && right_mantissa(x, 0, 127, mantissas[1]);
  });
}

// The same for the operation, with mantissas of `count` bits.
std::int64_t wrong_format(const double*, std::int64_t count, Range range) {
  const lowbit::Format format{2, count, 127};
  const int top = (1 << (count - 1)) - 1;
  const float L = std::nextafter(std::ldexp(1.0f, static_cast<int>(count) - 1), 0.0f);
  return first_wrong(range, [&](std::uint32_t bits) {
    const float x = lowbit::from_bits(bits);
    if (!finite(x)) return true;
    std::int8_t mantissas[2];
    std::int16_t exponent;
    lowbit::cast_row(&x, 1, format, mantissas, &exponent);
    const std::int64_t e = block_exponent(std::fabs(static_cast<double>(x)), static_cast<int>(count), 127);
    if (exponent != e || !right_mantissa(x, e, top, mantissas[0])) return false;
    if (std::fabs(x) > L) return true;
    const float pair[2] = {L, x};
    lowbit::cast_row(pair, 2, format, mantissas, &exponent);
    return exponent == 0 && right_mantissa(x, 0, top, mantissas[1]);
  });
}

// x beside the largest number L of a block, for every exponent e of a block: an activation, or with `count` bits of
// mantissas the operation. Only |x| >= 2^(e-2), and the number below, are cast. That one gives 0, and so does what is
// nearer to 0, since rounded products and sums of positive numbers do not fall where a factor grows.
std::int64_t wrong_scaled(const double*, std::int64_t count, Range range) {
  const int mantissa = count == 0 ? 8 : static_cast<int>(count), top = (1 << (mantissa - 1)) - 1;
  for (int e = -127; e <= 129 - mantissa; ++e) {
    const float L = std::ldexp(static_cast<float>(top), e);
    const double inverse = std::ldexp(1.0, -e);
    const auto cast_wrongly = [&](std::uint64_t first, std::uint64_t n) -> std::int64_t {
      float block[beside + 1] = {L};
      std::int8_t mantissas[beside + 1];
      std::int16_t exponent;
      for (std::uint64_t k = 0; k < n; ++k)
        block[k + 1] = lowbit::from_bits(static_cast<std::uint32_t>(first + k * range.step));
      if (count == 0)
        lowbit::cast_blocks(block, static_cast<std::int64_t>(n) + 1, mantissas, &exponent);
      else
        lowbit::cast_row(block, static_cast<std::int64_t>(n) + 1, lowbit::Format{beside + 1, count, 127}, mantissas,
                         &exponent);
      for (std::uint64_t k = 0; k < n; ++k) {
        const double exact = std::min(std::max(std::nearbyint(block[k + 1] * inverse), -1.0 * top), 1.0 * top);
        if (exponent != e || mantissas[k + 1] != exact) return static_cast<std::int64_t>(first + k * range.step);
      }
      return -1;
    };
    for (const std::uint64_t sign : {std::uint64_t{0}, std::uint64_t{1} << 31}) {
      const std::uint64_t least = sign | (lowbit::to_bits(std::ldexp(0.25f, e)) - 1), end = (sign | lowbit::to_bits(L)) + 1;
      const std::uint64_t before = least <= range.first ? 0 : (least - range.first + range.step - 1) / range.step;
      for (std::uint64_t bits = range.first + before * range.step; bits < std::min(end, range.end);) {
        const std::uint64_t left = (std::min(end, range.end) - bits + range.step - 1) / range.step;
        const std::uint64_t n = std::min<std::uint64_t>(left, beside);
        if (const std::int64_t wrong = cast_wrongly(bits, n); wrong >= 0) return wrong;
        bits += n * range.step;
      }
    }
  }
  return -1;
}

// int8, Q8_0, Q8_1 and Q8_K: the integer nearest to a product.
std::int64_t wrong_products(const double*, std::int64_t, Range range) {
  return first_wrong(range, [](std::uint32_t bits) {
    const float x = lowbit::from_bits(bits);
    if (!(std::fabs(x) <= 128.0f)) return true;
    std::int8_t code;
    lowbit::round_products(&x, 1, 1.0f, 127, &code);
    return code == std::min(std::nearbyint(static_cast<double>(x)), 127.0);
  });
}

// Types of 8 bits, which the specification casts: `given` are its results for the patterns of the range. Beyond the
// largest number lies the largest one; the pattern of NaN is all ones without a sign.
std::int64_t wrong_byte(const double* middles, std::int64_t count, Range range, const std::uint8_t* given) {
  Nearest nearest(middles, count);
  return first_wrong(range, [&](std::uint32_t bits) {
    const double x = lowbit::from_bits(bits);
    const std::uint32_t sign = bits >> 31 << 7;
    return *given++ == (is_nan(bits) ? 0x7Fu : (sign | nearest(std::fabs(x))));
  });
}
}
