// Products with so few tokens that weights are read where they lie: copies in another order, as
// products of many make of them, would take longer.
#pragma once

#include <cstdint>

namespace dynamo_moe::onnxruntime {

inline constexpr std::int64_t kMostFewRows = 24;

// result[r, o] = sum over i of weight[o, i] * rows[r, i] + bias[o], for some rows of a result with
// `width` columns; the bias may be null. Each weight is read from memory once.
void MultiplyFewRows(const float* weight, std::int64_t out, std::int64_t in, const float* bias,
                     const float* rows, std::int64_t count, float* result, std::int64_t width);

}  // namespace dynamo_moe::onnxruntime
