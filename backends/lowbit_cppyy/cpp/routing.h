// Routing: the scores of experts, the choice, and the weights of those chosen, for one token at a time.
//
// These are few numbers, so plain loops compute them in float64 and round once. Products of float32 are exact in
// float64, so a result does not depend on whether a compiler fuses them with additions.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "decode.h"

namespace lowbit {

// Probabilities of numbers, which are overwritten.
inline void softmax_wide(double* numbers, std::int64_t count, float* to) {
  double most = -std::numeric_limits<double>::infinity(), total = 0;
  for (std::int64_t n = 0; n < count; ++n) most = numbers[n] > most ? numbers[n] : most;
  for (std::int64_t n = 0; n < count; ++n) total += numbers[n] = std::exp(numbers[n] - most);
  for (std::int64_t n = 0; n < count; ++n) to[n] = static_cast<float>(numbers[n] / total);
}

// The logits of E experts for one token, or their probabilities; `router` is K x E, and `sums` has room for E numbers.
inline void gate_row(const float* x, const float* router, std::int64_t K, std::int64_t E, bool probabilities, double* sums,
                     float* scores) {
  std::fill_n(sums, E, 0.0);
  for (std::int64_t k = 0; k < K; ++k)
    for (std::int64_t e = 0; e < E; ++e) sums[e] += static_cast<double>(x[k]) * router[k * E + e];
  if (probabilities) return softmax_wide(sums, E, scores);
  for (std::int64_t e = 0; e < E; ++e) scores[e] = static_cast<float>(sums[e]);
}

// The k experts with the highest scores, best first; among equal scores the lowest number first.
inline void choose_row(const float* scores, std::int64_t E, std::int64_t k, std::int64_t* chosen) {
  for (std::int64_t place = 0; place < k; ++place) {
    std::int64_t best = -1;
    for (std::int64_t e = 0; e < E; ++e) {
      bool taken = false;
      for (std::int64_t n = 0; n < place; ++n) taken = taken || chosen[n] == e;
      if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
    }
    chosen[place] = best;
  }
}

// The weights of the k chosen experts: their softmax, or for probabilities each divided by their sum. `own` has room
// for k numbers.
inline void weigh_row(const float* scores, const std::int64_t* chosen, std::int64_t k, bool probabilities, double* own,
                      float* weights) {
  double total = 0;
  for (std::int64_t n = 0; n < k; ++n) total += own[n] = scores[chosen[n]];
  if (!probabilities) return softmax_wide(own, k, weights);
  for (std::int64_t n = 0; n < k; ++n) weights[n] = static_cast<float>(own[n] / total);
}

namespace bridge {

inline int gate(const float* x, const float* router, std::int64_t rows, std::int64_t K, std::int64_t E, bool probabilities,
                float* scores) {
  const StandardArithmetic arithmetic;
  std::vector<double> sums(E);
  for (std::int64_t t = 0; t < rows; ++t) gate_row(x + t * K, router, K, E, probabilities, sums.data(), scores + t * E);
  return OK;
}

inline int choose(const float* scores, std::int64_t rows, std::int64_t E, std::int64_t k, std::int64_t* chosen) {
  for (std::int64_t t = 0; t < rows; ++t) choose_row(scores + t * E, E, k, chosen + t * k);
  return OK;
}

inline int weigh(const float* scores, const std::int64_t* chosen, std::int64_t rows, std::int64_t E, std::int64_t k,
                 bool probabilities, float* weights) {
  const StandardArithmetic arithmetic;
  std::vector<double> own(k);
  for (std::int64_t t = 0; t < rows; ++t)
    weigh_row(scores + t * E, chosen + t * k, k, probabilities, own.data(), weights + t * k);
  return OK;
}

}  // namespace bridge
}  // namespace lowbit
