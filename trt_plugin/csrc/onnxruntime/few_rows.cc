#include "onnxruntime/few_rows.h"

#include "onnxruntime/clones.h"

namespace dynamo_moe::onnxruntime {
namespace {

// Independent sums of a dot product, so that the compiler uses vectors: its own would be in order.
constexpr std::int64_t kLanes = 16;

template <std::int64_t Count>
[[gnu::always_inline]] inline void Multiply(const float* weight, std::int64_t out, std::int64_t in,
                                            const float* bias, const float* rows, float* result) {
  const std::int64_t whole = in / kLanes * kLanes;
  for (std::int64_t o = 0; o < out; ++o) {
    const float* const w = weight + o * in;
    float sums[Count][kLanes] = {};
    for (std::int64_t i = 0; i < whole; i += kLanes) {
      for (std::int64_t r = 0; r < Count; ++r) {
        for (std::int64_t lane = 0; lane < kLanes; ++lane) {
          sums[r][lane] += w[i + lane] * rows[r * in + i + lane];
        }
      }
    }
    for (std::int64_t r = 0; r < Count; ++r) {
      for (std::int64_t i = whole; i < in; ++i) {
        sums[r][i - whole] += w[i] * rows[r * in + i];
      }
      for (std::int64_t half = kLanes / 2; half > 0; half /= 2) {
        for (std::int64_t lane = 0; lane < half; ++lane) {
          sums[r][lane] += sums[r][lane + half];
        }
      }
      result[r * out + o] = sums[r][0] + (bias == nullptr ? 0 : bias[o]);
    }
  }
}

}  // namespace

DYNAMO_MOE_CLONES void MultiplyFewRows(const float* weight, std::int64_t out, std::int64_t in,
                                       const float* bias, const float* rows, std::int64_t count,
                                       float* result) {
  switch (count) {
    case 1:
      Multiply<1>(weight, out, in, bias, rows, result);
      break;
    case 2:
      Multiply<2>(weight, out, in, bias, rows, result);
      break;
    case 3:
      Multiply<3>(weight, out, in, bias, rows, result);
      break;
    default:
      Multiply<kMostFewRows>(weight, out, in, bias, rows, result);
      break;
  }
}

}  // namespace dynamo_moe::onnxruntime
