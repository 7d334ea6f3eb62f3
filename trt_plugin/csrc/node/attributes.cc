#include "node/attributes.h"

#include <algorithm>
#include <iterator>
#include <limits>
#include <utility>

namespace dynamo_moe {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

// Keeps the value where there is no such attribute, unless it must be there.
Status ReadInteger(const NodeAttributes& attributes, const char* name, bool required,
                   std::int64_t least, std::int64_t most, std::uint32_t* value) {
  std::int64_t given = 0;
  if (!attributes.Integer(name, &given)) {
    return required ? InvalidArgument("attribute ", name, " is missing") : Status();
  }
  if (given < least || given > most) {
    return InvalidArgument("attribute ", name, " must be in ", least, "..", most, ", got ", given);
  }
  *value = static_cast<std::uint32_t>(given);
  return {};
}

Status ReadFeatures(const NodeAttributes& attributes, const char* name, const SizeLimits& limits,
                    std::uint32_t* value) {
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadInteger(attributes, name, true, limits.multiple, limits.features, value));
  return *value % limits.multiple == 0
             ? Status()
             : InvalidArgument("attribute ", name, " must be a multiple of ", limits.multiple,
                               ", got ", *value);
}

// How packed weights are stored.
Status ReadStorage(const NodeAttributes& attributes, dynamo_moe_layer* layer) {
  std::string given;
  attributes.Text(kWeightFormat, &given);
  DYNAMO_MOE_RETURN_IF_ERROR(ReadPackedFormat(given, &layer->weight_format));
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadInteger(attributes, kBlockSize, true, 0, kMaxSize, &layer->block_columns));
  layer->block_rows = 1;
  return ReadInteger(attributes, kBlockRows, false, 0, kMaxSize, &layer->block_rows);
}

// A block as large as both matrices is as good as one that is larger.
void NormalizeBlock(dynamo_moe_layer* layer) {
  const std::uint64_t gates = HasFlag(*layer, format::kGated) ? 2 : 1;
  const std::uint64_t rows = std::max(gates * layer->hidden, std::uint64_t{layer->width});
  layer->block_rows = layer->block_rows >= rows ? 0 : layer->block_rows;
  layer->block_columns =
      layer->block_columns >= std::max(layer->width, layer->hidden) ? 0 : layer->block_columns;
}

// Sets an option to the attribute, or to its default.
Status ReadOption(const NodeAttributes& attributes, const format::Option& option,
                  dynamo_moe_layer* layer) {
  if (option.type == format::Option::kFloat) {
    float number = option.initial;
    attributes.Number(option.attribute, &number);
    SetNumber(option, number, layer);
    return CheckNumber(option, number);
  }
  auto code = static_cast<std::uint32_t>(option.initial);
  if (option.type == format::Option::kName) {
    std::string text;
    if (attributes.Text(option.attribute, &text)) {
      DYNAMO_MOE_RETURN_IF_ERROR(ReadName(option, text, &code));
    }
  } else {
    const bool flag = option.type == format::Option::kBool;
    const auto least = static_cast<std::int64_t>(option.least);
    DYNAMO_MOE_RETURN_IF_ERROR(
        ReadInteger(attributes, option.attribute, false, least, flag ? 1 : kMaxSize, &code));
  }
  SetCode(option, code, layer);
  return {};
}

}  // namespace

Status ReadAttributes(const NodeAttributes& attributes, const Node& node, const SizeLimits& limits,
                      dynamo_moe_layer* layer) {
  *layer = {};
  layer->op = node.op;
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadInteger(attributes, "num_experts", true, 1, limits.experts, &layer->experts));
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadInteger(attributes, "top_k", true, 1, limits.top_k, &layer->top_k));
  DYNAMO_MOE_RETURN_IF_ERROR(ReadFeatures(attributes, "in_features", limits, &layer->width));
  DYNAMO_MOE_RETURN_IF_ERROR(ReadFeatures(attributes, "hidden_features", limits, &layer->hidden));
  if (node.op == format::kDropless && layer->top_k > layer->experts) {
    return InvalidArgument("attribute top_k must be at most num_experts, ", layer->experts,
                           ", got ", layer->top_k);
  }
  if (node.packed) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadStorage(attributes, layer));
  }
  for (const format::Option& option : format::kOptions) {
    if (HasOption(node, option)) {
      DYNAMO_MOE_RETURN_IF_ERROR(ReadOption(attributes, option, layer));
    }
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CompleteOptions(layer));
  if (node.packed) {
    NormalizeBlock(layer);
  }
  return {};
}

Status ReadOffload(const NodeAttributes& attributes, dynamo_moe_layer* layer, Offload* offload) {
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadInteger(attributes, kResidentExperts, true, 1, layer->experts, &layer->resident_experts));
  for (const auto& [name, source] :
       {std::pair(kW1Source, &offload->w1_source), std::pair(kW2Source, &offload->w2_source)}) {
    if (!attributes.Text(name, source)) {
      return InvalidArgument("attribute ", name, " is missing");
    }
  }
  std::uint32_t shared = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadInteger(attributes, kExpertCache, false, 0, 1, &shared));
  offload->shared = shared != 0;
  return {};
}

std::string Describe(const dynamo_moe_layer& layer) {
  std::string text;
  for (const format::Size& size : format::kSizes) {
    text += Text(size.attribute, "=", SizeOf(layer, size), " ");
  }
  if (FormatOf(layer).IsPacked()) {
    text += Text(kWeightFormat, "=", FormatOf(layer).name, " ", kBlockSize, "=",
                 layer.block_columns, " ", kBlockRows, "=", layer.block_rows, " ");
  }
  for (const format::Option& option : format::kOptions) {
    if (!HasEffect(layer, option) || (option.rare && CodeOf(layer, option) == 0)) {
      continue;
    }
    text += Text(option.attribute, "=");
    if (option.type == format::Option::kFloat) {
      text += Text(NumberOf(layer, option), " ");
    } else {
      const std::uint32_t code = CodeOf(layer, option);
      text += option.names == nullptr ? Text(code, " ") : Text(option.names[code], " ");
    }
  }
  if (layer.resident_experts != 0) {
    text += Text(kResidentExperts, "=", layer.resident_experts, " ");
  }
  text.pop_back();
  return text;
}

}  // namespace dynamo_moe
