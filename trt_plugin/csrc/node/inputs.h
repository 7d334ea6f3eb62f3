// Which of a node's inputs is which tensor of the layer, and what shapes and dtypes they have.
//
// Optional inputs come last. One is absent where the node has fewer inputs, or where it has no
// elements; any other is present, even if it is filled with zeros.
#pragma once

#include <array>
#include <cstdint>
#include <string>

#include "bundle/format.h"
#include "bundle/layer.h"
#include "node/node.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

inline constexpr std::int32_t kOutputs = 1;

// A tensor as a runtime describes it. A size of -1 is not known yet, and matches any.
struct TensorDescription {
  static constexpr std::int32_t kNoTensor = -1;
  static constexpr std::int32_t kUnknownRank = -2;

  std::uint32_t dtype = format::kNone;  // kNone: one that the kernels do not take.
  std::int32_t type = 0;                // The runtime's number of it.
  std::int32_t rank = kNoTensor;
  const std::int64_t* sizes = nullptr;
};

Status CheckCounts(const Node& node, std::int64_t inputs, std::int64_t outputs);

// The descriptions of one call's inputs, then of y.
struct NodeCall {
  Node node;
  const char* runtime;  // Its name in messages.
  std::int32_t inputs;
  std::array<TensorDescription, kMaxInputs + kOutputs> descriptions;

  format::Tensor tensor(std::int32_t position) const {
    return position == inputs ? format::kY : InputsOf(node)[static_cast<std::size_t>(position)];
  }
  const TensorDescription& at(std::int32_t position) const {
    return descriptions[static_cast<std::size_t>(position)];
  }
  bool Has(format::Tensor wanted) const;
  // Whether it has a tensor that concerns the layer, or y.
  bool Has(const dynamo_moe_layer& layer, format::Tensor wanted) const;
};

// Whether a tensor is [E, 1, 1], whatever E.
bool IsOneForEachExpert(const TensorDescription& given);

// Checks a tensor's shape against the layer and x. What the layer's format lacks is [E, 1, 1].
Status CheckShape(const dynamo_moe_layer& layer, format::Tensor tensor,
                  const TensorDescription& given, const TensorDescription& x);

// The code of a tensor's dtype in a layer; 0 where the layer lacks the tensor.
std::uint32_t DtypeIn(const dynamo_moe_layer& layer, format::Tensor tensor);

// A layer's inputs and their dtypes in words.
std::string InputsText(const dynamo_moe_layer& layer);

// Checks dtypes, shapes and the presence of optional inputs against the layer.
Status CheckCall(const dynamo_moe_layer& layer, const NodeCall& call);

// Completes a layer of attributes alone with the inputs' dtypes and presence, and checks the call.
Status CompleteLayer(const NodeCall& call, dynamo_moe_layer* layer);

// A layer without what follows from its inputs and the bundle: dtypes, biases, tf32.
dynamo_moe_layer AttributesOf(dynamo_moe_layer layer);

bool HasAttributes(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes);

// Whether a layer of the bundle has these attributes, and these dtypes up to a position.
bool Matches(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes,
             const NodeCall& call, std::int32_t last);

// The product of x's sizes except the last, at most the largest integer; -1 where one is unknown.
std::int64_t Tokens(const TensorDescription& x);

// The tensors that a layer's kernels take, from the memory of the node's inputs. What the layer
// lacks lies beyond the node's inputs, or is not read.
dynamo_moe_tensors TensorsOf(const dynamo_moe_layer& layer, const void* const* inputs, void* y);

}  // namespace dynamo_moe
