// The experts' activation, on the first product's result.
//
// Legend: H hidden width, F = H, or 2H when gated, R tokens of one expert.
#pragma once

#include <cstdint>

#include "bundle/layer.h"

namespace dynamo_moe::onnxruntime {

// Writes the hidden rows [R, H] of z [R, F]; the two may not overlap.
void Activate(const dynamo_moe_layer& layer, std::int64_t rows, const float* z, float* hidden);

// The same of columns: [H, R] of z [F, R].
void ActivateColumns(const dynamo_moe_layer& layer, std::int64_t columns, const float* z,
                     float* hidden);

}  // namespace dynamo_moe::onnxruntime
