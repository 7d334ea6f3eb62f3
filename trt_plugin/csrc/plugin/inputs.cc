#include "plugin/inputs.h"

#include <algorithm>
#include <cstddef>
#include <type_traits>

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::DataType;
using nvinfer1::Dims;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

template <typename Description>
const PluginTensorDesc* Plain(const Description* description) {
  if constexpr (std::is_same_v<Description, DynamicPluginTensorDesc>) {
    return &description->desc;
  } else {
    return description;
  }
}

// Gathers the descriptions up to the position `last`; later ones are of no tensor.
template <typename Description>
Status Gather(const Node& node, const Description* in, std::int32_t inputs, const Description* out,
              std::int32_t last, NodeCall* call) {
  if (in == nullptr || out == nullptr) {
    return InvalidArgument("the descriptions of the inputs and of the output must not be null");
  }
  call->node = node;
  call->runtime = "TensorRT";
  call->inputs = inputs;
  for (std::int32_t i = 0; i <= last; ++i) {
    const PluginTensorDesc& given = *Plain(i < inputs ? in + i : out);
    if (given.dims.nbDims > Dims::MAX_DIMS) {
      return InvalidArgument("a tensor has ", given.dims.nbDims, " dimensions, at most ",
                             static_cast<int>(Dims::MAX_DIMS), " are permitted");
    }
    call->descriptions[static_cast<std::size_t>(i)] = DescriptionOf(given.dims, given.type);
  }
  return {};
}

template <typename Description>
Status MakeWhole(const Node& node, const Description* in, std::int32_t inputs,
                 const Description* out, std::int32_t outputs, NodeCall* call) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node, inputs, outputs));
  DYNAMO_MOE_RETURN_IF_ERROR(Gather(node, in, inputs, out, inputs, call));
  for (std::int32_t i = 0; i <= inputs; ++i) {
    const format::Tensor tensor = call->tensor(i);
    const TensorFormat given = Plain(i < inputs ? in + i : out)->format;
    if (given != TensorFormat::kLINEAR && (i == inputs || call->Has(tensor))) {
      return InvalidArgument(NameOf(tensor), " must be in linear format, got format ",
                             static_cast<std::int32_t>(given));
    }
  }
  return {};
}

}  // namespace

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

TensorDescription DescriptionOf(const Dims& dims, DataType type) {
  // A tensor that does not exist has a negative number of dimensions.
  return {DtypeCode(type), static_cast<std::int32_t>(type),
          std::max(dims.nbDims, TensorDescription::kNoTensor), dims.d};
}

Status MakeCall(const Node& node, const PluginTensorDesc* in, std::int32_t inputs,
                const PluginTensorDesc* out, std::int32_t outputs, NodeCall* call) {
  return MakeWhole(node, in, inputs, out, outputs, call);
}

Status MakeCall(const Node& node, const DynamicPluginTensorDesc* in, std::int32_t inputs,
                const DynamicPluginTensorDesc* out, std::int32_t outputs, NodeCall* call) {
  return MakeWhole(node, in, inputs, out, outputs, call);
}

Status MakeCallUpTo(std::int32_t position, const Node& node, const DynamicPluginTensorDesc* in_out,
                    std::int32_t inputs, std::int32_t outputs, NodeCall* call) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node, inputs, outputs));
  if (position < 0 || position > inputs) {
    return InvalidArgument("there is no position ", position, " among ", inputs, " inputs");
  }
  const DynamicPluginTensorDesc* const out = in_out == nullptr ? nullptr : in_out + inputs;
  return Gather(node, in_out, inputs, out, position, call);
}

}  // namespace dynamo_moe::plugin
