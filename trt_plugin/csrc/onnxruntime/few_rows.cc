#include "onnxruntime/few_rows.h"

#include "onnxruntime/vectors.h"

namespace dynamo_moe::onnxruntime {
namespace {

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> Read(const float* numbers) {
  Floats<Lanes> vector;
  std::memcpy(&vector, numbers, sizeof(vector));
  return vector;
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void MultiplyBy(const float* weight, std::int64_t out, std::int64_t in,
                                  const float* bias, const float* rows, std::int64_t count,
                                  float* result) {
  WithCount<kMostFewRows>(count, [&](auto constant) DYNAMO_MOE_INLINED {
    for (std::int64_t o = 0; o < out; ++o) {
      const float* const w = weight + o * in;
      Products<constant(), Lanes> products{rows, in, {}, {}};
      ReadColumns<Lanes>(
          0, in, [&](std::int64_t i) DYNAMO_MOE_INLINED { return Read<Lanes>(w + i); },
          [&](std::int64_t i) DYNAMO_MOE_INLINED { return w[i]; }, &products);
      products.Write(bias, o, out, result);
    }
  });
}

}  // namespace

void MultiplyFewRows(const float* weight, std::int64_t out, std::int64_t in, const float* bias,
                     const float* rows, std::int64_t count, float* result) {
  ForCpu([&](auto lanes) DYNAMO_MOE_INLINED {
    MultiplyBy<lanes()>(weight, out, in, bias, rows, count, result);
  });
}

}  // namespace dynamo_moe::onnxruntime
