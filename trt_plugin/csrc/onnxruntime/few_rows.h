// Products with a few tokens, which take as long as the weights take to be read.
#pragma once

#include <cstdint>

namespace dynamo_moe::onnxruntime {

inline constexpr std::int64_t kMostFewRows = 4;

// result[r, o] = sum over i of weight[o, i] * rows[r, i] + bias[o], for up to kMostFewRows rows;
// the bias may be null. Each weight is read once.
void MultiplyFewRows(const float* weight, std::int64_t out, std::int64_t in, const float* bias,
                     const float* rows, std::int64_t count, float* result);

}  // namespace dynamo_moe::onnxruntime
