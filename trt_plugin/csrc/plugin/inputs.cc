#include "plugin/inputs.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <string>
#include <string_view>
#include <type_traits>

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

constexpr std::int64_t kUnknown = -1;

bool IsEmpty(const Dims& dims) {
  const std::int64_t* const end = dims.d + std::clamp(dims.nbDims, 0, std::int32_t{Dims::MAX_DIMS});
  // A tensor that does not exist has a negative number of dimensions.
  return dims.nbDims < 0 || std::find(dims.d, end, 0) != end;
}

std::string ShapeText(const Dims& dims) {
  std::string text = "[";
  for (std::int32_t axis = 0; axis < dims.nbDims; ++axis) {
    text += Text(axis == 0 ? "" : ", ", dims.d[axis]);
  }
  return text + "]";
}

bool SameSize(std::int64_t a, std::int64_t b) { return a == b || a == kUnknown || b == kUnknown; }

Status CheckWeight(const dynamo_moe_layer& layer, format::Tensor tensor, const Dims& dims) {
  const Shape shape = ShapeOf(layer, tensor);
  Dims wanted = {};
  wanted.nbDims = shape.rank;
  std::copy(shape.sizes, shape.sizes + shape.rank, wanted.d);
  const bool same =
      dims.nbDims == shape.rank && std::equal(dims.d, dims.d + shape.rank, shape.sizes, SameSize);
  return same ? Status()
              : InvalidArgument(NameOf(tensor), " must have shape ", ShapeText(wanted), ", got ",
                                ShapeText(dims));
}

// x, expert_ids, expert_weights, y: [..., last], with x's leading sizes.
Status CheckTokens(format::Tensor tensor, const Dims& dims, std::int64_t last, const Dims& x) {
  const bool same = dims.nbDims == x.nbDims && dims.nbDims >= 1 &&
                    SameSize(dims.d[dims.nbDims - 1], last) &&
                    std::equal(dims.d, dims.d + dims.nbDims - 1, x.d, SameSize);
  return same
             ? Status()
             : InvalidArgument(NameOf(tensor), " must have shape [..., ", last,
                               "] with the tokens of x, ", ShapeText(x), "; got ", ShapeText(dims));
}

Status CheckShape(const dynamo_moe_layer& layer, format::Tensor tensor, const Dims& dims,
                  const Dims& x) {
  switch (tensor) {
    case format::kX:
    case format::kY:
      return CheckTokens(tensor, dims, layer.width, x);
    case format::kExpertIds:
    case format::kExpertWeights:
      return CheckTokens(tensor, dims, layer.top_k, x);
    default:
      return CheckWeight(layer, tensor, dims);
  }
}

Status CheckDtype(const dynamo_moe_layer& layer, format::Tensor tensor, DataType type) {
  const std::uint32_t wanted = DtypeIn(layer, tensor);
  if (DtypeCode(type) == wanted) {
    return {};
  }
  return InvalidArgument(NameOf(tensor), " must be ", DtypeName(wanted), ", got ",
                         DtypeName(DtypeCode(type)), " (TensorRT's type ",
                         static_cast<std::int32_t>(type), ")");
}

Status CheckAllowed(const dynamo_moe_layer& layer, format::Tensor tensor, DataType type) {
  const std::uint32_t allowed = DtypesOf(layer, tensor);
  if (((allowed >> DtypeCode(type)) & 1) != 0) {
    return {};
  }
  std::string names;
  for (std::uint32_t code = 1; code < std::size(format::kDataTypeNames); ++code) {
    if (((allowed >> code) & 1) != 0) {
      names += Text(names.empty() ? "" : ", ", DtypeName(code));
    }
  }
  return InvalidArgument(NameOf(tensor), " must be one of ", names, "; got TensorRT's type ",
                         static_cast<std::int32_t>(type));
}

bool IsOneForEachExpert(const Dims& dims) {
  return dims.nbDims == 3 && dims.d[1] == 1 && dims.d[2] == 1;
}

// What a layer does not have must be absent, or stand for none.
Status CheckIgnored(const dynamo_moe_layer& layer, format::Tensor tensor,
                    const PluginTensorDesc& description) {
  const Dims& dims = description.dims;
  if (!IsIgnored(layer, tensor) || IsEmpty(dims)) {
    return {};
  }
  if (IsOneForEachExpert(dims) && SameSize(dims.d[0], layer.experts)) {
    return CheckAllowed(layer, tensor, description.type);
  }
  return InvalidArgument(NameOf(tensor),
                         " must be [E, 1, 1], which stand for none: ", FormatOf(layer).name,
                         " has no ", IsZeroPoints(tensor) ? "zero points" : "global scales",
                         ", got ", ShapeText(dims));
}

template <typename Description>
const PluginTensorDesc* Plain(const Description& description) {
  if constexpr (std::is_same_v<Description, DynamicPluginTensorDesc>) {
    return &description.desc;
  } else {
    return &description;
  }
}

// Gathers the descriptions up to the position `last`; later ones stay null.
template <typename Description>
Status Gather(const Node& node, const Description* in, std::int32_t inputs, const Description* out,
              std::int32_t last, Call* call) {
  if (in == nullptr || out == nullptr) {
    return InvalidArgument("the descriptions of the inputs and of the output must not be null");
  }
  call->node = node;
  call->inputs = inputs;
  for (std::int32_t i = 0; i <= last; ++i) {
    const PluginTensorDesc* const description = Plain(i < inputs ? in[i] : out[0]);
    if (description->dims.nbDims > Dims::MAX_DIMS) {
      return InvalidArgument("a tensor has ", description->dims.nbDims, " dimensions, at most ",
                             static_cast<int>(Dims::MAX_DIMS), " are permitted");
    }
    call->descriptions[static_cast<std::size_t>(i)] = description;
  }
  return {};
}

}  // namespace

Status CheckCounts(const Node& node, std::int32_t inputs, std::int32_t outputs) {
  const auto required = static_cast<std::int32_t>(RequiredInputs(node));
  const auto most = static_cast<std::int32_t>(InputsOf(node).size());
  if (inputs >= required && inputs <= most && outputs == kOutputs) {
    return {};
  }
  std::string names;
  for (std::int32_t i = 0; i < most; ++i) {
    names += Text(i == 0 ? "" : ", ", NameOf(InputsOf(node)[static_cast<std::size_t>(i)]),
                  i < required ? "" : " (optional)");
  }
  return InvalidArgument("the layer has ", required, " to ", most, " inputs, ", names,
                         ", and 1 output; got ", inputs, " and ", outputs);
}

bool Call::Has(format::Tensor wanted) const {
  for (std::int32_t i = 0; i < inputs; ++i) {
    if (tensor(i) == wanted) {
      return !IsOptional(wanted) || !IsEmpty(at(i).dims);
    }
  }
  return false;
}

Status MakeCall(const Node& node, const PluginTensorDesc* in, std::int32_t inputs,
                const PluginTensorDesc* out, std::int32_t outputs, Call* call) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node, inputs, outputs));
  return Gather(node, in, inputs, out, inputs, call);
}

Status MakeCall(const Node& node, const DynamicPluginTensorDesc* in, std::int32_t inputs,
                const DynamicPluginTensorDesc* out, std::int32_t outputs, Call* call) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node, inputs, outputs));
  return Gather(node, in, inputs, out, inputs, call);
}

Status MakeCallUpTo(std::int32_t position, const Node& node, const DynamicPluginTensorDesc* in_out,
                    std::int32_t inputs, std::int32_t outputs, Call* call) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node, inputs, outputs));
  if (position < 0 || position > inputs) {
    return InvalidArgument("there is no position ", position, " among ", inputs, " inputs");
  }
  const DynamicPluginTensorDesc* const out = in_out == nullptr ? nullptr : in_out + inputs;
  return Gather(node, in_out, inputs, out, position, call);
}

std::uint32_t DtypeCode(DataType type) {
  switch (type) {
    case DataType::kFLOAT:
      return format::kFloat32;
    case DataType::kHALF:
      return format::kFloat16;
    case DataType::kBF16:
      return format::kBfloat16;
    case DataType::kINT32:
      return format::kI32;
    case DataType::kINT64:
      return format::kI64;
    case DataType::kINT8:
      return format::kI8;
    default:
      return format::kNone;
  }
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

bool Call::Has(const dynamo_moe_layer& layer, format::Tensor wanted) const {
  return wanted == format::kY || (!IsIgnored(layer, wanted) && Has(wanted));
}

Status CheckCall(const dynamo_moe_layer& layer, const Call& call) {
  const Dims& x = call.at(0).dims;
  for (std::int32_t i = 0; i <= call.inputs; ++i) {
    const format::Tensor tensor = call.tensor(i);
    const bool present = call.Has(layer, tensor);
    if (!present && DtypeIn(layer, tensor) == format::kNone) {
      DYNAMO_MOE_RETURN_IF_ERROR(CheckIgnored(layer, tensor, call.at(i)));
      continue;
    }
    if (present != (DtypeIn(layer, tensor) != format::kNone)) {
      return InvalidArgument("the kernels are for a layer ", present ? "without " : "with ",
                             NameOf(tensor));
    }
    const PluginTensorDesc& description = call.at(i);
    if (description.format != TensorFormat::kLINEAR) {
      return InvalidArgument(NameOf(tensor), " must be in linear format, got format ",
                             static_cast<std::int32_t>(description.format));
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckDtype(layer, tensor, description.type));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckShape(layer, tensor, description.dims, x));
  }
  for (const format::Tensor tensor : InputsOf(call.node)) {
    if (DtypeIn(layer, tensor) != format::kNone && !call.Has(tensor)) {
      return InvalidArgument("the kernels are for a layer with ", NameOf(tensor),
                             ", which is not among the ", call.inputs, " inputs");
    }
  }
  return {};
}

Status CompleteLayer(const Call& call, dynamo_moe_layer* layer) {
  for (std::int32_t i = 0; i < call.inputs; ++i) {
    const format::Tensor tensor = call.tensor(i);
    if (!call.Has(*layer, tensor)) {
      continue;
    }
    const std::uint32_t code = DtypeCode(call.at(i).type);
    DYNAMO_MOE_RETURN_IF_ERROR(CheckAllowed(*layer, tensor, call.at(i).type));
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
          layer->zero_points = IsOneForEachExpert(call.at(i).dims) ? format::kOneForEachExpert
                                                                   : format::kOneForEachScale;
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

bool Matches(const dynamo_moe_layer& layer, const dynamo_moe_layer& attributes, const Call& call,
             std::int32_t last) {
  if (!HasAttributes(layer, attributes)) {
    return false;
  }
  for (std::int32_t i = 0; i <= last; ++i) {
    const format::Tensor tensor = call.tensor(i);
    const bool present = call.Has(layer, tensor);
    if (DtypeIn(layer, tensor) != (present ? DtypeCode(call.at(i).type) : format::kNone)) {
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

std::int64_t Tokens(const Dims& x) {
  std::int64_t tokens = 1;
  for (std::int32_t axis = 0; axis + 1 < x.nbDims; ++axis) {
    if (x.d[axis] < 0) {
      return kUnknown;
    }
    if (__builtin_mul_overflow(tokens, x.d[axis], &tokens)) {
      return std::numeric_limits<std::int64_t>::max();
    }
  }
  return tokens;
}

}  // namespace dynamo_moe::plugin
