// The choice of a token by its logits, as `lowbit.model.sampling` defines it: the same exponential, the same integers,
// the same generator, and so the same token. The only difference: the list of tokens is sorted only as far as it is
// read.
#pragma once

#include <cmath>
#include <limits>
#include <numeric>
#include <utility>

#include "bridge.h"

namespace lowbit {

struct Sampling {
  double temperature, top_p, min_p;
  std::int64_t top_k;
};

constexpr double one_weight = 0x1p44;

constexpr std::int64_t at_once = 64;  // exponentials: a compiler vectorises loops of this length

// x = e^x for x <= 0. Each product and each sum is a separate statement, so that a compiler cannot fuse them.
inline void exponentials(double (&x)[at_once]) {
  constexpr double high = 0.693147180369123816490, low = 1.90821492927058770002e-10, integers = 6755399441055744.0;
  constexpr double factorials[] = {1,     1,      2,       6,        24,        120,        720,
                                   5040., 40320., 362880., 3628800., 39916800., 479001600., 6227020800.};
  double r[at_once], total[at_once], power[at_once];
  for (int i = 0; i < at_once; ++i) {
    const double within = x[i] < -64.0 ? -64.0 : x[i];
    const double quotient = within / (high + low);
    const double shifted = quotient + integers;  // its low bits are the nearest integer n
    const double n = shifted - integers;
    const double first = n * high, second = n * low;
    const double rest = within - first;
    r[i] = rest - second;
    std::uint64_t bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;  // of 2^n
    std::memcpy(&power[i], &bits, sizeof bits);
    total[i] = 1 / factorials[13];
  }
  for (int degree = 12; degree >= 0; --degree)
    for (int i = 0; i < at_once; ++i) {
      const double product = total[i] * r[i];
      total[i] = product + 1 / factorials[degree];
    }
  for (int i = 0; i < at_once; ++i) {
    const double result = total[i] * power[i];
    x[i] = x[i] < -64.0 ? 0.0 : result;
  }
}

// The first 64 bits of a block of Philox4x64-10.
inline std::uint64_t random_bits(std::uint64_t seed, std::uint64_t position, std::uint64_t sequence) {
  std::uint64_t c[4] = {position, sequence, 0, 0}, key[2] = {seed, 0};
  for (int round = 0; round < 10; ++round) {
    const unsigned __int128 a = static_cast<unsigned __int128>(c[0]) * 0xD2E7470EE14C6C93u;
    const unsigned __int128 b = static_cast<unsigned __int128>(c[2]) * 0xCA5A826395121157u;
    const std::uint64_t next[4] = {static_cast<std::uint64_t>(b >> 64) ^ c[1] ^ key[0], static_cast<std::uint64_t>(b),
                                   static_cast<std::uint64_t>(a >> 64) ^ c[3] ^ key[1], static_cast<std::uint64_t>(a)};
    std::memcpy(c, next, sizeof c);
    key[0] += 0x9E3779B97F4A7C15u, key[1] += 0xBB67AE8584CAA73Bu;
  }
  return c[0];
}

// The smallest integer that is at least a fraction (0 to 1) of a number below 2^63.
inline std::int64_t rounded_up(double fraction, std::int64_t of) {
  if (fraction == 0) return 0;
  int power;
  const std::uint64_t digits = static_cast<std::uint64_t>(std::ldexp(std::frexp(fraction, &power), 53));
  const int shift = 53 - power;
  if (shift >= 127) return 1;
  const unsigned __int128 product = static_cast<unsigned __int128>(digits) * static_cast<std::uint64_t>(of);
  return static_cast<std::int64_t>((product + (static_cast<unsigned __int128>(1) << shift) - 1) >> shift);
}

// Whether a token precedes another in the list.
struct Before {
  const std::int64_t* weights;

  bool operator()(std::int32_t a, std::int32_t b) const {
    return weights[a] > weights[b] || (weights[a] == weights[b] && a < b);
  }
};

// The memory in which a token is drawn. It is allocated ahead, because an allocation may fail.
struct Drawing {
  std::vector<std::int64_t> weights;
  std::vector<std::int32_t> tokens;

  void make(std::int64_t count) {
    weights.resize(count);
    tokens.reserve(count);
  }
};

// The first tokens of a list: the heaviest first, and among equals the lowest number first, without those of weight 0.
// They lie in buckets by the first four digits of their weights in binary, and by the number of digits. A bucket is
// sorted when it is read.
class Ordered {
 public:
  // The first `most` tokens.
  Ordered(Drawing& drawing, std::int64_t most) : weights_(drawing.weights.data()), tokens_(drawing.tokens) {
    for (std::int64_t weight : drawing.weights) ++ends_[bucket(weight)];
    std::int64_t used = 0, first = 0, start = 0;
    for (; used < buckets && start < most; ++used) {
      first = start;
      start += std::exchange(ends_[used], first);
    }
    tokens_.resize(start);
    for (std::size_t i = 0; i < drawing.weights.size(); ++i)
      if (const std::int64_t b = bucket(weights_[i]); b < used) tokens_[ends_[b]++] = static_cast<std::int32_t>(i);
    if (start <= most) return;
    std::nth_element(tokens_.begin() + first, tokens_.begin() + most, tokens_.end(), Before{weights_});
    tokens_.resize(ends_[used - 1] = most);
  }

  std::int64_t size() const { return static_cast<std::int64_t>(tokens_.size()); }
  std::int64_t weight(std::int64_t n) { return weights_[token(n)]; }
  std::int32_t token(std::int64_t n) {
    while (n >= sorted_) {
      std::sort(tokens_.begin() + sorted_, tokens_.begin() + ends_[next_], Before{weights_});
      sorted_ = ends_[next_++];
    }
    return tokens_[n];
  }
  std::int64_t sum_from(std::int64_t least) const {
    std::int64_t sum = 0;
    for (std::int32_t token : tokens_) sum += weights_[token] >= least ? weights_[token] : 0;
    return sum;
  }

 private:
  static constexpr std::int64_t buckets = 45 * 8;  // of the weights 2^44 to 1
  static std::int64_t bucket(std::int64_t weight) {
    if (weight == 0) return buckets;
    const int power = 63 - __builtin_clzll(static_cast<unsigned long long>(weight));
    return buckets - 1 - (8 * power + (weight << 3 >> power & 7));
  }

  const std::int64_t* weights_;
  std::vector<std::int32_t>& tokens_;
  std::int64_t ends_[buckets + 1] = {}, next_ = 0, sorted_ = 0;
};

// The sum of the weights that the filters keep: those of at least `least`, up to the first at which the sum is `reached`.
inline std::int64_t kept_sum(Ordered& list, std::int64_t least, std::int64_t reached) {
  std::int64_t sum = 0;
  for (std::int64_t n = 0; n < list.size() && sum < reached && list.weight(n) >= least; ++n) sum += list.weight(n);
  return sum;
}

// The weights as integers: the powers times 2^44, rounded down. Numbers below 2^52 are rounded by adding it.
inline void round_down(const double (&powers)[at_once], std::int64_t (&weights)[at_once]) {
  constexpr double integers = 0x1p52;
  for (int i = 0; i < at_once; ++i) {
    const double exact = powers[i] * one_weight;
    const double shifted = exact + integers;
    const double nearest = shifted - integers;
    const double below = nearest > exact ? shifted - 1.0 : shifted;
    std::memcpy(&weights[i], &below, sizeof below);
    weights[i] &= (std::int64_t{1} << 52) - 1;
  }
}

// The token; `temperature` is above 0, all logits are finite, and `most` is the greatest.
inline std::int32_t choose(const float* logits, std::int64_t count, double most, const Sampling& how, std::uint64_t random,
                           Drawing& drawing) {
  for (std::int64_t start = 0; start < count; start += at_once) {
    const std::int64_t length = std::min(at_once, count - start);
    double powers[at_once] = {};
    std::int64_t weights[at_once];
    for (std::int64_t i = 0; i < length; ++i) powers[i] = (static_cast<double>(logits[start + i]) - most) / how.temperature;
    exponentials(powers);
    round_down(powers, weights);
    std::copy_n(weights, length, drawing.weights.begin() + start);
  }
  Ordered list(drawing, how.top_k > 0 ? how.top_k : count);
  const std::int64_t least = std::max<std::int64_t>(1, rounded_up(how.min_p, std::int64_t{1} << 44));
  const std::int64_t sum = how.top_p == 1 ? list.sum_from(least) : kept_sum(list, least, rounded_up(how.top_p, list.sum_from(1)));
  const std::int64_t drawn = static_cast<std::int64_t>(static_cast<unsigned __int128>(random) * static_cast<std::uint64_t>(sum) >> 64);
  std::int64_t place = 0;
  for (std::int64_t before = list.weight(0); before <= drawn; before += list.weight(place)) ++place;
  return list.token(place);
}

// The likeliest of a run of tokens, the first among equals, and whether all logits are finite.
struct Likeliest {
  float logit = -std::numeric_limits<float>::infinity();
  std::int32_t token = 0;
  bool finite = true;

  void join(const Likeliest& other) {
    finite = finite && other.finite;
    if (other.logit > logit || (other.logit == logit && other.token < token)) logit = other.logit, token = other.token;
  }
};

inline Likeliest likeliest(const float* logits, std::int32_t first, std::int32_t last) {
  constexpr std::int32_t lanes = 16;  // each finds the likeliest of its own tokens; a compiler vectorises the loops
  float most[lanes];
  std::int32_t token[lanes], wrong[lanes];
  for (std::int32_t i = 0; i < lanes; ++i) most[i] = -std::numeric_limits<float>::infinity(), token[i] = first, wrong[i] = 0;
  std::int32_t n = first;
  for (; n + lanes <= last; n += lanes)
    for (std::int32_t i = 0; i < lanes; ++i) {
      std::int32_t bits;
      std::memcpy(&bits, logits + n + i, sizeof bits);
      const bool more = logits[n + i] > most[i];
      most[i] = more ? logits[n + i] : most[i];
      token[i] = more ? n + i : token[i];
      wrong[i] |= (bits & 0x7FFFFFFF) >= 0x7F800000;
    }
  Likeliest found;
  found.token = first;
  for (std::int32_t i = 0; i < lanes; ++i) found.join({most[i], token[i], wrong[i] == 0});
  for (; n < last; ++n) found.join({logits[n], n, std::isfinite(logits[n])});
  return found;
}

namespace bridge {

// `settings`: temperature, top_p, min_p. `place`: the seed, the position and the sequence. Returns the token; -1 for
// too little memory.
inline int choose_token(const float* logits, std::int64_t count, const double* settings, std::int64_t top_k,
                        const std::uint64_t* place) {
  if (count == 0) return OK;
  try {
    const Sampling how{settings[0], settings[1], settings[2], top_k};
    const Likeliest first = likeliest(logits, 0, static_cast<std::int32_t>(count));
    Drawing drawing;
    drawing.make(count);
    return choose(logits, count, first.logit, how, random_bits(place[0], place[1], place[2]), drawing);
  } catch (const std::bad_alloc&) {
    return -1;
  }
}

}  // namespace bridge
}  // namespace lowbit
