// Which of a node's inputs is which tensor of the layer, and what shapes and dtypes they have.
//
// Optional inputs come last. One is absent where the node has fewer inputs, or where it has no
// elements; any other is present, even if it is filled with zeros.
#pragma once

#include <array>
#include <cstdint>

#include "bundle/format.h"
#include "bundle/layer.h"
#include "plugin/attributes.h"
#include "plugin/tensorrt_abi.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe::plugin {

inline constexpr std::int32_t kOutputs = 1;

Status CheckCounts(const Node& node, std::int32_t inputs, std::int32_t outputs);

// The descriptions of one call's inputs, then of y.
struct Call {
  Node node;
  std::int32_t inputs;
  std::array<const nvinfer1::PluginTensorDesc*, kMaxInputs + kOutputs> descriptions;

  format::Tensor tensor(std::int32_t position) const {
    return position == inputs ? format::kY : InputsOf(node)[static_cast<std::size_t>(position)];
  }
  const nvinfer1::PluginTensorDesc& at(std::int32_t position) const {
    return *descriptions[static_cast<std::size_t>(position)];
  }
  bool Has(format::Tensor wanted) const;
  // Whether it has a tensor that concerns the layer, or y.
  bool Has(const dynamo_moe_layer& layer, format::Tensor wanted) const;
};

// Checks the counts, and gathers what TensorRT passes as arrays of either kind of description.
Status MakeCall(const Node& node, const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                const nvinfer1::PluginTensorDesc* out, std::int32_t outputs, Call* call);
Status MakeCall(const Node& node, const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                const nvinfer1::DynamicPluginTensorDesc* out, std::int32_t outputs, Call* call);

// The same for inputs and y in one array, which TensorRT has filled in up to a position.
Status MakeCallUpTo(std::int32_t position, const Node& node,
                    const nvinfer1::DynamicPluginTensorDesc* in_out, std::int32_t inputs,
                    std::int32_t outputs, Call* call);

// 0 for types that the kernels do not take.
std::uint32_t DtypeCode(nvinfer1::DataType type);

// The code of a tensor's dtype in a layer; 0 where the layer lacks the tensor.
std::uint32_t DtypeIn(const dynamo_moe_layer& layer, format::Tensor tensor);

// Checks formats, dtypes, shapes and the presence of optional inputs against the layer. A size of
// -1, which is not known yet, matches any.
Status CheckCall(const dynamo_moe_layer& layer, const Call& call);

// Completes a layer of attributes alone with the inputs' dtypes and presence, and checks the call.
Status CompleteLayer(const Call& call, dynamo_moe_layer* layer);

// A layer without what follows from its inputs and the bundle: dtypes, biases, tf32.
dynamo_moe_layer AttributesOf(dynamo_moe_layer layer);

bool HasAttributes(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes);

// Whether a layer of the bundle has these attributes, and these dtypes up to a position.
bool Matches(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes, const Call& call,
             std::int32_t last);

// The product of x's sizes except the last, at most the largest integer; -1 where one is unknown.
std::int64_t Tokens(const nvinfer1::Dims& x);

}  // namespace dynamo_moe::plugin
