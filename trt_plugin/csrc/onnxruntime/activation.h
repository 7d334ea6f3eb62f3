// The experts' activation, on the first product's result.
//
// Legend: H hidden width, F = H, or 2H when gated, R rows of one expert.
#pragma once

#include "bundle/layer.h"
#include "onnxruntime/runtime.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

class Activation {
 public:
  Status Create(const Api& api, const OrtKernelInfo* info, const dynamo_moe_layer& layer);

  // Writes the hidden rows [R, H] of z [R, F]; the two may not overlap.
  Status OfRows(const Call& call, std::int64_t rows, const float* z, float* hidden) const;
  // Writes the hidden rows as columns [H, R], of z [F, R].
  Status OfColumns(const Call& call, std::int64_t rows, const float* z, float* hidden) const;

 private:
  struct Layout;
  Status Run(const Call& call, const Layout& layout, float* hidden) const;

  dynamo_moe_layer layer_ = {};
  // The runtime's vectorised function, where the activation has one.
  Op function_;
};

}  // namespace dynamo_moe::onnxruntime
