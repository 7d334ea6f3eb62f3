// What a node in ONNX Runtime says of its layer, and what a call of it is given.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "bundle/format.h"
#include "bundle/layer.h"
#include "node/node.h"
#include "onnxruntime/ort_abi.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

struct LayerNode {
  Node node;
  dynamo_moe_layer layer = {};
  std::array<std::uint32_t, format::kTensors> dtypes = {};  // Of the inputs that the node has.

  bool Has(format::Tensor tensor) const { return dtypes[tensor] != format::kNone; }
};

// Checks a node's attributes and the types of its inputs.
Status ReadLayer(const Api& api, const OrtKernelInfo* info, const Node& node, LayerNode* layer);

struct Tensors {
  std::array<const void*, format::kTensors> data = {};
  std::array<bool, format::kTensors> one_zero_point = {};  // For an expert's whole matrix.
  std::vector<std::int64_t> sizes;                         // Of x.
  std::int64_t tokens = 0;
};

// Checks the shapes of a call's inputs.
Status ReadTensors(const Api& api, const OrtKernelContext* context, const LayerNode& layer,
                   Tensors* tensors);

}  // namespace dynamo_moe::onnxruntime
