// Elementary functions of vectors of float32.
//
// The errors are the largest of millions against float64, in units of the last place of the true
// value. The polynomials are our own fits, with the least largest error.
#pragma once

#include <cstdint>

#include "onnxruntime/vectors.h"

namespace dynamo_moe::onnxruntime {

template <typename V>
using IntegersOf = Integers<sizeof(V) / sizeof(float)>;

// Comparisons that a NaN fails keep it.
template <typename V>
DYNAMO_MOE_INLINE V Most(const V& numbers, float bound) {
  const V bounds = V{} + bound;
  return numbers > bounds ? bounds : numbers;
}
template <typename V>
DYNAMO_MOE_INLINE V Least(const V& numbers, float bound) {
  const V bounds = V{} + bound;
  return numbers < bounds ? bounds : numbers;
}

template <typename V>
DYNAMO_MOE_INLINE V Magnitudes(const V& numbers) {
  return BitsOf<V>(BitsOf<IntegersOf<V>>(numbers) & 0x7FFFFFFF);
}

// The magnitudes of some numbers with the signs of others.
template <typename V>
DYNAMO_MOE_INLINE V WithSigns(const V& magnitudes, const V& signs) {
  const IntegersOf<V> sign_bits = BitsOf<IntegersOf<V>>(signs) & INT32_MIN;
  return BitsOf<V>(BitsOf<IntegersOf<V>>(magnitudes) | sign_bits);
}

// c[0] + c[1] x + c[2] x^2 + …
template <typename V, std::int64_t Count>
DYNAMO_MOE_INLINE V Polynomial(const V& x, const float (&coefficients)[Count]) {
  V sum = V{} + coefficients[Count - 1];
  for (std::int64_t i = Count - 2; i >= 0; --i) {
    sum = sum * x + coefficients[i];
  }
  return sum;
}

// 2^n exp(r) with |r| up to half of log(2): 1.2 units.
template <typename V>
DYNAMO_MOE_INLINE V Exp(const V& x) {
  constexpr float log2_e = 1.44269504F;
  constexpr float log_2 = 0.693145752F;  // Its first bits, which n times are exact, and the rest.
  constexpr float log_2_rest = 1.42860677e-6F;
  constexpr float whole = 0x1.8p23F;  // Added to a number, it leaves no bits of a fraction.
  // Beyond these the result is zero or infinite.
  const V bounded = Most(Least(x, -104), 89);
  const V shifted = bounded * log2_e + whole;
  const V n = shifted - whole;
  const V r = bounded - n * log_2 - n * log_2_rest;
  const V power = Polynomial(
      r, {1, 1, 0.499999934F, 0.166665206F, 0.0416683879F, 0.00836871545F, 0.00138146014F});
  // 2^n in two factors, as it may be no normal number.
  const IntegersOf<V> exponent = BitsOf<IntegersOf<V>>(shifted) - BitsOf<std::int32_t>(whole);
  const IntegersOf<V> half = exponent >> 1;
  return power * BitsOf<V>((half + 127) << 23) * BitsOf<V>((exponent - half + 127) << 23);
}

// 2.5 units down to -86; the least true values become zero.
template <typename V>
DYNAMO_MOE_INLINE V Sigmoid(const V& x) {
  return 1 / (1 + Exp(V(-x)));
}

// 1.4 units.
template <typename V>
DYNAMO_MOE_INLINE V Tanh(const V& x) {
  constexpr float small = 0.625F;
  const V square = x * x;
  const V near_zero = Polynomial(
      square, {-0.333332839F, 0.133314913F, -0.0537434964F, 0.0206505818F, -0.00571703903F});
  const V magnitudes = Magnitudes(x);
  const V far = 1 - 2 / (1 + Exp(V(2 * magnitudes)));
  return magnitudes < small ? x + x * square * near_zero : WithSigns(far, x);
}

// 1 - erf(x), for x that is not negative: exp(-x^2) times a polynomial of 1 / (1 + 0.4 x). 8 units
// up to 1, and as many as x^2 has from there on: the rounding of the exponent.
template <typename V>
DYNAMO_MOE_INLINE V Erfc(const V& x) {
  const V t = 1 / (1 + 0.4F * x);
  return Exp(V(-x * x)) * t *
         Polynomial(t, {0.225690184F, 0.225294328F, 0.211940559F, 0.14415887F, 0.228648915F,
                        -0.200889715F, 0.444259439F, -0.419551598F, 0.163584633F, -0.0231355969F});
}

}  // namespace dynamo_moe::onnxruntime
