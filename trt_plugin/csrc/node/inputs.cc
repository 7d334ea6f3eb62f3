#include "node/inputs.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>

namespace dynamo_moe {
namespace {

constexpr std::int64_t kUnknown = -1;

bool IsEmpty(const TensorDescription& tensor) {
  if (tensor.rank == TensorDescription::kUnknownRank) {
    return false;
  }
  return tensor.rank < 0 ||
         std::find(tensor.sizes, tensor.sizes + tensor.rank, 0) != tensor.sizes + tensor.rank;
}

std::string ShapeText(const std::int64_t* sizes, std::int32_t rank) {
  std::string text = "[";
  for (std::int32_t axis = 0; axis < rank; ++axis) {
    text += Text(axis == 0 ? "" : ", ", sizes[axis]);
  }
  return text + "]";
}

std::string ShapeText(const TensorDescription& tensor) {
  return ShapeText(tensor.sizes, tensor.rank);
}

bool SameSize(std::int64_t a, std::int64_t b) { return a == b || a == kUnknown || b == kUnknown; }

Status CheckWeight(const dynamo_moe_layer& layer, format::Tensor tensor,
                   const TensorDescription& given) {
  const Shape shape = ShapeOf(layer, tensor);
  const bool same = given.rank == shape.rank &&
                    std::equal(given.sizes, given.sizes + shape.rank, shape.sizes, SameSize);
  return same ? Status()
              : InvalidArgument(NameOf(tensor), " must have shape ",
                                ShapeText(shape.sizes, shape.rank), ", got ", ShapeText(given));
}

// x, expert_ids, expert_weights, y: [..., last], with x's leading sizes.
Status CheckTokens(format::Tensor tensor, const TensorDescription& given, std::int64_t last,
                   const TensorDescription& x) {
  if (x.rank == TensorDescription::kUnknownRank) {
    return {};
  }
  const bool same = given.rank == x.rank && given.rank >= 1 &&
                    SameSize(given.sizes[given.rank - 1], last) &&
                    std::equal(given.sizes, given.sizes + given.rank - 1, x.sizes, SameSize);
  return same ? Status()
              : InvalidArgument(NameOf(tensor), " must have shape [..., ", last,
                                "] with the tokens of x, ", ShapeText(x), "; got ",
                                ShapeText(given));
}

Status CheckDtype(const dynamo_moe_layer& layer, const NodeCall& call, std::int32_t position) {
  const format::Tensor tensor = call.tensor(position);
  const TensorDescription& given = call.at(position);
  const std::uint32_t wanted = DtypeIn(layer, tensor);
  return given.dtype == wanted ? Status()
                               : InvalidArgument(NameOf(tensor), " must be ", DtypeName(wanted),
                                                 ", got ", DtypeName(given.dtype), " (",
                                                 call.runtime, "'s type ", given.type, ")");
}

Status CheckAllowed(const dynamo_moe_layer& layer, const NodeCall& call, std::int32_t position) {
  const format::Tensor tensor = call.tensor(position);
  const TensorDescription& given = call.at(position);
  const std::uint32_t allowed = DtypesOf(layer, tensor);
  if (((allowed >> given.dtype) & 1) != 0) {
    return {};
  }
  std::string names;
  for (std::uint32_t code = 1; code < std::size(format::kDataTypeNames); ++code) {
    if (((allowed >> code) & 1) != 0) {
      names += Text(names.empty() ? "" : ", ", DtypeName(code));
    }
  }
  return InvalidArgument(NameOf(tensor), " must be one of ", names, "; got ", call.runtime,
                         "'s type ", given.type);
}

// What a layer does not have must be absent, or stand for none.
Status CheckIgnored(const dynamo_moe_layer& layer, const NodeCall& call, std::int32_t position) {
  const format::Tensor tensor = call.tensor(position);
  const TensorDescription& given = call.at(position);
  if (!IsIgnored(layer, tensor) || IsEmpty(given)) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckShape(layer, tensor, given, call.at(0)));
  return CheckAllowed(layer, call, position);
}

}  // namespace

bool IsOneForEachExpert(const TensorDescription& given) {
  return given.rank == 3 && given.sizes[1] == 1 && given.sizes[2] == 1;
}

Status CheckShape(const dynamo_moe_layer& layer, format::Tensor tensor,
                  const TensorDescription& given, const TensorDescription& x) {
  if (given.rank == TensorDescription::kUnknownRank) {
    return {};
  }
  if (IsIgnored(layer, tensor)) {
    return IsOneForEachExpert(given) && SameSize(given.sizes[0], layer.experts)
               ? Status()
               : InvalidArgument(NameOf(tensor), " must have shape [", layer.experts,
                                 ", 1, 1], which stands for none: ", FormatOf(layer).name,
                                 " has no ", IsZeroPoints(tensor) ? "zero points" : "global scales",
                                 ", got ", ShapeText(given));
  }
  switch (tensor) {
    case format::kX:
    case format::kY:
      return CheckTokens(tensor, given, layer.width, x);
    case format::kExpertIds:
    case format::kExpertWeights:
      return CheckTokens(tensor, given, layer.top_k, x);
    default:
      return CheckWeight(layer, tensor, given);
  }
}

Status CheckCounts(const Node& node, std::int64_t inputs, std::int64_t outputs) {
  const auto required = static_cast<std::int64_t>(RequiredInputs(node));
  const auto most = static_cast<std::int64_t>(InputsOf(node).size());
  if (inputs >= required && inputs <= most && outputs == kOutputs) {
    return {};
  }
  std::string names;
  for (std::int64_t i = 0; i < most; ++i) {
    names += Text(i == 0 ? "" : ", ", NameOf(InputsOf(node)[static_cast<std::size_t>(i)]),
                  i < required ? "" : " (optional)");
  }
  return InvalidArgument("the layer has ", required, " to ", most, " inputs, ", names,
                         ", and 1 output; got ", inputs, " and ", outputs);
}

bool NodeCall::Has(format::Tensor wanted) const {
  for (std::int32_t i = 0; i < inputs; ++i) {
    if (tensor(i) == wanted) {
      return !IsOptional(wanted) || !IsEmpty(at(i));
    }
  }
  return false;
}

std::uint32_t DtypeIn(const dynamo_moe_layer& layer, format::Tensor tensor) {
  switch (tensor) {
    case format::kX:
    case format::kY:
      return layer.tokens_dtype;
    case format::kRouterWeight:
    case format::kExpertIds:
      return layer.routing_dtype;
    case format::kRouterBias:
    case format::kExpertWeights:
      return layer.weights_dtype;
    case format::kSelectionBias:
      return layer.selection_dtype;
    case format::kB1:
      return HasFlag(layer, format::kHasB1) ? layer.experts_dtype : format::kNone;
    case format::kB2:
      return HasFlag(layer, format::kHasB2) ? layer.experts_dtype : format::kNone;
    case format::kW1Scales:
    case format::kW2Scales:
      return layer.scales_dtype;
    case format::kW1ZeroPoints:
    case format::kW2ZeroPoints:
      return layer.zero_points != format::kNoZeroPoints ? format::kI8 : format::kNone;
    case format::kW1GlobalScales:
    case format::kW2GlobalScales:
      return FormatOf(layer).has_global_scales ? format::kFloat32 : format::kNone;
    default:
      return FormatOf(layer).values;
  }
}

bool NodeCall::Has(const dynamo_moe_layer& layer, format::Tensor wanted) const {
  return wanted == format::kY || (!IsIgnored(layer, wanted) && Has(wanted));
}

std::string InputsText(const dynamo_moe_layer& layer) {
  std::string text;
  for (const format::Tensor tensor : InputsOf(NodeOf(layer))) {
    if (const std::uint32_t code = DtypeIn(layer, tensor); code != format::kNone) {
      text += Text(text.empty() ? "" : ", ", NameOf(tensor), " ", DtypeName(code));
    }
  }
  return text;
}

Status CheckCall(const dynamo_moe_layer& layer, const NodeCall& call) {
  for (std::int32_t i = 0; i <= call.inputs; ++i) {
    const format::Tensor tensor = call.tensor(i);
    const bool present = call.Has(layer, tensor);
    if (!present && DtypeIn(layer, tensor) == format::kNone) {
      DYNAMO_MOE_RETURN_IF_ERROR(CheckIgnored(layer, call, i));
      continue;
    }
    if (present != (DtypeIn(layer, tensor) != format::kNone)) {
      return InvalidArgument("the kernels are for a layer ", present ? "without " : "with ",
                             NameOf(tensor));
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckDtype(layer, call, i));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckShape(layer, tensor, call.at(i), call.at(0)));
  }
  for (const format::Tensor tensor : InputsOf(call.node)) {
    if (DtypeIn(layer, tensor) != format::kNone && !call.Has(tensor)) {
      return InvalidArgument("the kernels are for a layer with ", NameOf(tensor),
                             ", which is not among the ", call.inputs, " inputs");
    }
  }
  return {};
}

Status CompleteLayer(const NodeCall& call, dynamo_moe_layer* layer) {
  for (std::int32_t i = 0; i < call.inputs; ++i) {
    const format::Tensor tensor = call.tensor(i);
    if (!call.Has(*layer, tensor)) {
      continue;
    }
    const std::uint32_t code = call.at(i).dtype;
    DYNAMO_MOE_RETURN_IF_ERROR(CheckAllowed(*layer, call, i));
    switch (tensor) {
      case format::kX:
        layer->tokens_dtype = code;
        if (call.node.packed) {
          layer->experts_dtype = code;
        }
        break;
      case format::kRouterWeight:
      case format::kExpertIds:
        layer->routing_dtype = code;
        break;
      case format::kRouterBias:
      case format::kExpertWeights:
        layer->weights_dtype = code;
        break;
      case format::kSelectionBias:
        layer->selection_dtype = code;
        break;
      case format::kW1:
        if (!call.node.packed) {
          layer->weight_format = PlainFormatOf(code);
          layer->experts_dtype = code;
        }
        break;
      case format::kW1Scales:
        layer->scales_dtype = code;
        break;
      case format::kW1ZeroPoints:
      case format::kW2ZeroPoints:
        // One for each expert in both, or one for each scale.
        if (layer->zero_points != format::kOneForEachScale) {
          // Where experts lie in a file, the one of a node stands for all.
          layer->zero_points =
              IsOneForEachExpert(call.at(i)) ? format::kOneForEachExpert : format::kOneForEachScale;
        }
        break;
      case format::kB1:
        layer->flags |= format::kHasB1;
        break;
      case format::kB2:
        layer->flags |= format::kHasB2;
        break;
      default:
        break;
    }
  }
  return CheckCall(*layer, call);
}

dynamo_moe_layer AttributesOf(dynamo_moe_layer layer) {
  layer.tokens_dtype = layer.experts_dtype = layer.routing_dtype = layer.weights_dtype =
      layer.selection_dtype = layer.scales_dtype = layer.zero_points = 0;
  if (!FormatOf(layer).IsPacked()) {
    layer.weight_format = 0;
  }
  layer.flags &= ~static_cast<std::uint32_t>(format::kHasB1 | format::kHasB2 | format::kHasTf32);
  return layer;
}

bool HasAttributes(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes) {
  const dynamo_moe_layer own = AttributesOf(layer);
  // Records are compared as bytes.
  const std::string_view bytes(reinterpret_cast<const char*>(&own), sizeof(own));
  return bytes == std::string_view(reinterpret_cast<const char*>(&attributes), sizeof(attributes));
}

bool Matches(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes,
             const NodeCall& call, std::int32_t last) {
  if (!HasAttributes(layer, attributes)) {
    return false;
  }
  for (std::int32_t i = 0; i <= last; ++i) {
    const format::Tensor tensor = call.tensor(i);
    const bool present = call.Has(layer, tensor);
    if (DtypeIn(layer, tensor) != (present ? call.at(i).dtype : format::kNone)) {
      return false;
    }
  }
  // The inputs after that position are not known yet, but those that the node lacks are.
  const Span<format::Tensor> order = InputsOf(call.node);
  for (auto i = static_cast<std::size_t>(call.inputs); i < order.size(); ++i) {
    if (DtypeIn(layer, order[i]) != format::kNone) {
      return false;
    }
  }
  return true;
}

std::int64_t Tokens(const TensorDescription& x) {
  std::int64_t tokens = 1;
  for (std::int32_t axis = 0; axis + 1 < x.rank; ++axis) {
    if (x.sizes[axis] < 0) {
      return kUnknown;
    }
    if (__builtin_mul_overflow(tokens, x.sizes[axis], &tokens)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return tokens;
}

dynamo_moe_tensors TensorsOf(const dynamo_moe_layer& layer, const void* const* inputs, void* y) {
  // In the order of dynamo_moe_tensors and of format::Tensor.
  const void* tensors[format::kTensors] = {};
  const Span<format::Tensor> order = InputsOf(NodeOf(layer));
  for (std::size_t i = 0; i < order.size(); ++i) {
    if (DtypeIn(layer, order[i]) != format::kNone) {
      tensors[order[i]] = inputs[i];
    }
  }
  return {tensors[format::kX],
          tensors[format::kRouterWeight],
          tensors[format::kRouterBias],
          tensors[format::kSelectionBias],
          tensors[format::kExpertIds],
          tensors[format::kExpertWeights],
          tensors[format::kW1],
          tensors[format::kW1Scales],
          tensors[format::kW1ZeroPoints],
          tensors[format::kW1GlobalScales],
          tensors[format::kB1],
          tensors[format::kW2],
          tensors[format::kW2Scales],
          tensors[format::kW2ZeroPoints],
          tensors[format::kW2GlobalScales],
          tensors[format::kB2],
          y};
}

}  // namespace dynamo_moe
