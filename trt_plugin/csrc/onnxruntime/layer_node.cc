#include "onnxruntime/layer_node.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <numeric>
#include <string>

#include "onnxruntime/runtime.h"

namespace dynamo_moe::onnxruntime {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

std::uint32_t DtypeCode(ElementType type) {
  switch (type) {
    case kFloatElements:
      return format::kFloat32;
    case kFloat16Elements:
      return format::kFloat16;
    case kBfloat16Elements:
      return format::kBfloat16;
    case kInt8Elements:
      return format::kI8;
    case kInt32Elements:
      return format::kI32;
    case kInt64Elements:
      return format::kI64;
    default:
      return format::kNone;
  }
}

std::string ShapeText(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    text += Text(text.size() == 1 ? "" : ", ", size);
  }
  return text + "]";
}

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

// Reads a node's attributes.
class Attributes {
 public:
  Attributes(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  Status Integer(const char* name, std::int64_t least, std::int64_t most,
                 std::uint32_t* value) const {
    std::int64_t given = 0;
    if (!Find(name, &given)) {
      return InvalidArgument("attribute ", name, " is missing");
    }
    if (given < least || given > most) {
      return InvalidArgument("attribute ", name, " must be in ", least, "..", most, ", got ",
                             given);
    }
    *value = static_cast<std::uint32_t>(given);
    return {};
  }

  // Keeps the value where there is no such attribute.
  Status OptionalInteger(const char* name, std::int64_t least, std::int64_t most,
                         std::uint32_t* value) const {
    std::int64_t given = 0;
    return Find(name, &given) ? Integer(name, least, most, value) : Status();
  }

  // Whether there is such an attribute.
  Status Name(const char* name, bool* found, std::string* text) const {
    std::size_t size = 0;
    *found = Take(api_, api_.KernelInfoGetAttribute_string(info_, name, nullptr, &size)).ok();
    if (!*found) {
      return {};
    }
    text->assign(size, '\0');
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api_, api_.KernelInfoGetAttribute_string(info_, name, text->data(), &size)));
    text->resize(std::strlen(text->c_str()));
    return {};
  }

  // Sets an option to the attribute, or to its default.
  Status Option(const format::Option& option, dynamo_moe_layer* layer) const {
    if (option.type == format::Option::kFloat) {
      float number = option.initial;
      const Status found =
          Take(api_, api_.KernelInfoGetAttribute_float(info_, option.attribute, &number));
      number = found.ok() ? number : option.initial;
      SetNumber(option, number, layer);
      return CheckNumber(option, number);
    }
    auto code = static_cast<std::uint32_t>(option.initial);
    if (option.type == format::Option::kName) {
      bool found = false;
      std::string text;
      DYNAMO_MOE_RETURN_IF_ERROR(Name(option.attribute, &found, &text));
      if (found) {
        DYNAMO_MOE_RETURN_IF_ERROR(ReadName(option, text, &code));
      }
    } else {
      const bool flag = option.type == format::Option::kBool;
      const auto least = static_cast<std::int64_t>(option.least);
      DYNAMO_MOE_RETURN_IF_ERROR(
          OptionalInteger(option.attribute, least, flag ? 1 : kMaxSize, &code));
    }
    SetCode(option, code, layer);
    return {};
  }

 private:
  bool Find(const char* name, std::int64_t* value) const {
    return Take(api_, api_.KernelInfoGetAttribute_int64(info_, name, value)).ok();
  }

  const Api& api_;
  const OrtKernelInfo* info_;
};

// How packed weights are stored.
Status ReadStorage(const Attributes& attributes, dynamo_moe_layer* layer) {
  bool found = false;
  std::string given;
  DYNAMO_MOE_RETURN_IF_ERROR(attributes.Name(kWeightFormat, &found, &given));
  DYNAMO_MOE_RETURN_IF_ERROR(ReadPackedFormat(given, &layer->weight_format));
  DYNAMO_MOE_RETURN_IF_ERROR(attributes.Integer(kBlockSize, 0, kMaxSize, &layer->block_columns));
  layer->block_rows = 1;
  DYNAMO_MOE_RETURN_IF_ERROR(
      attributes.OptionalInteger(kBlockRows, 0, kMaxSize, &layer->block_rows));
  const format::WeightFormat& weights = FormatOf(*layer);
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

Status ReadAttributes(const Attributes& attributes, const Node& node, dynamo_moe_layer* layer) {
  layer->op = node.op;
  // Twice a size still fits.
  DYNAMO_MOE_RETURN_IF_ERROR(attributes.Integer("num_experts", 1, kMaxSize, &layer->experts));
  DYNAMO_MOE_RETURN_IF_ERROR(attributes.Integer("in_features", 1, kMaxSize, &layer->width));
  DYNAMO_MOE_RETURN_IF_ERROR(
      attributes.Integer("hidden_features", 1, kMaxSize / 2, &layer->hidden));
  const bool router = node.op == format::kDropless;
  DYNAMO_MOE_RETURN_IF_ERROR(
      attributes.Integer("top_k", 1, router ? layer->experts : kMaxSize, &layer->top_k));
  if (node.packed) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadStorage(attributes, layer));
  }
  for (const format::Option& option : format::kOptions) {
    if (HasOption(node, option)) {
      DYNAMO_MOE_RETURN_IF_ERROR(attributes.Option(option, layer));
    }
  }
  return CompleteOptions(layer);
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
  OrtTypeInfo* made = nullptr;
  const Status found = Take(api, api.KernelInfo_GetInputTypeInfo(info, index, &made));
  const Owned<OrtTypeInfo> type_info(made, {api.ReleaseTypeInfo});
  if (!found.ok() || made == nullptr) {
    if (IsOptional(tensor)) {
      return {};  // It has an empty name.
    }
    return found.ok() ? InvalidArgument(NameOf(tensor), " has no type") : found;
  }
  const OrtTensorTypeAndShapeInfo* shaped = nullptr;
  ElementType type = kUndefined;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CastTypeInfoToTensorInfo(made, &shaped)));
  if (shaped != nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorElementType(shaped, &type)));
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckDtype(layer->layer, tensor, type));
  layer->dtypes[tensor] = DtypeCode(type);
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

struct Description {
  ElementType type = kUndefined;
  std::vector<std::int64_t> sizes;
};

Status Describe(const Api& api, const OrtValue* value, Description* description) {
  OrtTensorTypeAndShapeInfo* made = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorTypeAndShape(value, &made)));
  const Owned<OrtTensorTypeAndShapeInfo> info(made, {api.ReleaseTensorTypeAndShapeInfo});
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorElementType(made, &description->type)));
  std::size_t rank = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetDimensionsCount(made, &rank)));
  description->sizes.resize(rank);
  return Take(api, api.GetDimensions(made, description->sizes.data(), rank));
}

Status CheckShape(const dynamo_moe_layer& layer, format::Tensor tensor,
                  const std::vector<std::int64_t>& sizes, const std::vector<std::int64_t>& x) {
  const Shape shape = ShapeOf(layer, tensor);
  if (shape.rank != 0) {
    const std::vector<std::int64_t> wanted(shape.sizes, shape.sizes + shape.rank);
    return sizes == wanted ? Status()
                           : InvalidArgument(NameOf(tensor), " must have shape ", ShapeText(wanted),
                                             ", got ", ShapeText(sizes));
  }
  const std::int64_t last = tensor == format::kX ? layer.width : layer.top_k;
  const bool same = sizes.size() == x.size() && !sizes.empty() && sizes.back() == last &&
                    std::equal(sizes.begin(), sizes.end() - 1, x.begin());
  return same ? Status()
              : InvalidArgument(NameOf(tensor), " must have shape [..., ", last,
                                "] with the tokens of x, ", ShapeText(x), "; got ",
                                ShapeText(sizes));
}

Status CheckTensor(const LayerNode& layer, format::Tensor tensor, const Description& description,
                   Tensors* tensors) {
  if (DtypeCode(description.type) != layer.dtypes[tensor]) {
    return InvalidArgument(NameOf(tensor), " must be ", DtypeName(layer.dtypes[tensor]),
                           ", got ONNX's type ", static_cast<std::int32_t>(description.type));
  }
  const std::vector<std::int64_t> for_each_expert = {layer.layer.experts, 1, 1};
  const bool ignored = IsIgnored(layer.layer, tensor);
  if ((ignored || IsZeroPoints(tensor)) && description.sizes == for_each_expert) {
    tensors->one_zero_point[tensor] = true;
    return {};
  }
  if (ignored) {
    return InvalidArgument(NameOf(tensor), " must have shape ", ShapeText(for_each_expert),
                           ", which stands for none: ", FormatOf(layer.layer).name, " has no ",
                           IsZeroPoints(tensor) ? "zero points" : "global scales", ", got ",
                           ShapeText(description.sizes));
  }
  return CheckShape(layer.layer, tensor, description.sizes, tensors->sizes);
}

}  // namespace

Status ReadLayer(const Api& api, const OrtKernelInfo* info, const Node& node, LayerNode* layer) {
  layer->node = node;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadAttributes(Attributes(api, info), node, &layer->layer));
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
    Description description;
    DYNAMO_MOE_RETURN_IF_ERROR(Describe(api, value, &description));
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
