// The experts' activation, on the transposed result of the first product.
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

  // Turns z [F, R] into hidden rows [H, R] in its first elements. The scratch is [H, R].
  Status operator()(const Call& call, std::int64_t rows, float* z, float* scratch) const;

 private:
  dynamo_moe_layer layer_ = {};
  // The runtime's vectorised function, where the activation has one.
  Op function_;
};

}  // namespace dynamo_moe::onnxruntime
