#include "onnxruntime/layer_node.h"

#include <algorithm>
#include <cstddef>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>

#include "node/attributes.h"
#include "node/inputs.h"
#include "onnxruntime/node_info.h"
#include "onnxruntime/runtime.h"

namespace dynamo_moe::onnxruntime {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

// The names of dtypes, of which each has a bit.
std::string DtypeNames(std::uint32_t dtypes) {
  std::string names;
  for (std::uint32_t code = 1; code < std::size(format::kDataTypeNames); ++code) {
    if (((dtypes >> code) & 1) != 0) {
      dtypes &= ~(1U << code);
      const char* const separator = dtypes != 0 ? ", " : " or ";
      names += Text(names.empty() ? "" : separator, DtypeName(code));
    }
  }
  return names;
}

// A layer of any size: the runtime's products have no limits. Twice a size still fits.
constexpr SizeLimits kLimits = {kMaxSize, kMaxSize, kMaxSize / 2, 1};

Status ReadLayerAttributes(const NodeAttributes& attributes, const Node& node,
                           dynamo_moe_layer* layer) {
  DYNAMO_MOE_RETURN_IF_ERROR(ReadAttributes(attributes, node, kLimits, layer));
  const format::WeightFormat& weights = FormatOf(*layer);
  if (!node.packed) {
    return {};
  }
  if (weights.has_zero_points) {
    layer->zero_points = format::kOneForEachScale;  // Or for each expert: shapes tell.
  }
  for (const auto& [name, size] :
       {std::pair("in_features", layer->width), std::pair("hidden_features", layer->hidden)}) {
    if (size % weights.per_element != 0) {
      return InvalidArgument("attribute ", name, " must be a multiple of ", weights.per_element,
                             " where weights are ", weights.name, ", got ", size);
    }
  }
  return {};
}

Status CheckDtype(const dynamo_moe_layer& layer, format::Tensor tensor, ElementType type) {
  const std::uint32_t allowed = DtypesOf(layer, tensor);
  return ((allowed >> DtypeCode(type)) & 1) != 0
             ? Status()
             : InvalidArgument(NameOf(tensor), " must be ", DtypeNames(allowed),
                               " in the library's operator, got ONNX's type ",
                               static_cast<std::int32_t>(type));
}

Status ReadDtype(const Api& api, const OrtKernelInfo* info, std::size_t index,
                 format::Tensor tensor, LayerNode* layer) {
  bool found = false;
  TensorType type;
  DYNAMO_MOE_RETURN_IF_ERROR(TypeOfInput(api, info, index, &found, &type));
  if (!found) {
    return IsOptional(tensor) ? Status() : InvalidArgument(NameOf(tensor), " has no type");
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckDtype(layer->layer, tensor, type.type));
  layer->dtypes[tensor] = DtypeCode(type.type);
  return {};
}

// Checks that tensors have the same dtype as another, where they are there.
Status CheckSame(const LayerNode& layer, format::Tensor other,
                 std::initializer_list<format::Tensor> tensors) {
  for (const format::Tensor tensor : tensors) {
    if (layer.Has(tensor) && layer.dtypes[tensor] != layer.dtypes[other]) {
      return InvalidArgument(NameOf(tensor), " must be ", DtypeName(layer.dtypes[other]), ", as ",
                             NameOf(other),
                             layer.node.packed && other != format::kX ? " are" : " is", ", got ",
                             DtypeName(layer.dtypes[tensor]));
    }
  }
  return {};
}

Status ReadDtypes(const Api& api, const OrtKernelInfo* info, LayerNode* layer) {
  const Span<format::Tensor> order = InputsOf(layer->node);
  std::size_t count = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.KernelInfo_GetInputCount(info, &count)));
  for (std::size_t i = 0; i < std::min(count, order.size()); ++i) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadDtype(api, info, i, order[i], layer));
  }
  layer->layer.selection_dtype = layer->dtypes[format::kSelectionBias];
  if (!layer->node.packed) {
    layer->layer.experts_dtype = layer->dtypes[format::kW1];
    layer->layer.weight_format = PlainFormatOf(layer->layer.experts_dtype);
    return CheckSame(*layer, format::kW1, {format::kW2, format::kB1, format::kB2});
  }
  layer->layer.experts_dtype = layer->dtypes[format::kX];
  layer->layer.scales_dtype = layer->dtypes[format::kW1Scales];
  for (const format::Tensor tensor : {format::kW1GlobalScales, format::kW2GlobalScales}) {
    if (FormatOf(layer->layer).has_global_scales && !layer->Has(tensor)) {
      return InvalidArgument(NameOf(tensor), " is missing: ", FormatOf(layer->layer).name,
                             " has one for each row");
    }
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckSame(*layer, format::kW1Scales, {format::kW2Scales}));
  return CheckSame(*layer, format::kX, {format::kB1, format::kB2});
}

TensorDescription DescriptionOf(const std::vector<std::int64_t>& sizes) {
  TensorDescription description;
  description.rank = static_cast<std::int32_t>(sizes.size());
  description.sizes = sizes.data();
  return description;
}

Status CheckTensor(const LayerNode& layer, format::Tensor tensor, const TensorType& given,
                   Tensors* tensors) {
  if (DtypeCode(given.type) != layer.dtypes[tensor]) {
    return InvalidArgument(NameOf(tensor), " must be ", DtypeName(layer.dtypes[tensor]),
                           ", got ONNX's type ", static_cast<std::int32_t>(given.type));
  }
  const TensorDescription description = DescriptionOf(given.sizes);
  tensors->one_zero_point[tensor] = IsZeroPoints(tensor) && IsOneForEachExpert(description) &&
                                    description.sizes[0] == layer.layer.experts;
  return tensors->one_zero_point[tensor]
             ? Status()
             : CheckShape(layer.layer, tensor, description, DescriptionOf(tensors->sizes));
}

}  // namespace

Status ReadLayer(const Api& api, const OrtKernelInfo* info, const Node& node, LayerNode* layer) {
  layer->node = node;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadLayerAttributes(KernelAttributes(api, info), node, &layer->layer));
  return ReadDtypes(api, info, layer);
}

Status ReadTensors(const Api& api, const OrtKernelContext* context, const LayerNode& layer,
                   Tensors* tensors) {
  const Span<format::Tensor> order = InputsOf(layer.node);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const format::Tensor tensor = order[i];
    if (!layer.Has(tensor)) {
      continue;
    }
    const OrtValue* value = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.KernelContext_GetInput(context, i, &value)));
    if (value == nullptr) {
      return InvalidArgument(NameOf(tensor), " is missing");
    }
    TensorType description;
    DYNAMO_MOE_RETURN_IF_ERROR(TypeOf(api, value, &description));
    if (tensor == format::kX) {
      tensors->sizes = description.sizes;
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckTensor(layer, tensor, description, tensors));
    void* data = nullptr;
    // The interface has no other way to read; nothing is written.
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api, api.GetTensorMutableData(const_cast<OrtValue*>(value), &data)));
    tensors->data[tensor] = data;
  }
  const std::vector<std::int64_t>& sizes = tensors->sizes;
  tensors->tokens =
      std::accumulate(sizes.begin(), sizes.end() - 1, std::int64_t{1}, std::multiplies<>());
  if (tensors->tokens > kMaxSize / layer.layer.top_k) {
    return InvalidArgument("x must have at most ", kMaxSize / layer.layer.top_k, " tokens, got ",
                           tensors->tokens);
  }
  return {};
}

}  // namespace dynamo_moe::onnxruntime
