#include "node/node.h"

#include <algorithm>
#include <cmath>
#include <iterator>

namespace dynamo_moe {
namespace {

constexpr format::Tensor kDroplessInputs[] = {format::kX,  format::kRouterWeight, format::kW1,
                                              format::kW2, format::kRouterBias,   format::kB1,
                                              format::kB2, format::kSelectionBias};
constexpr format::Tensor kExpertsInputs[] = {
    format::kX,  format::kExpertIds, format::kExpertWeights, format::kW1, format::kW2,
    format::kB1, format::kB2};
constexpr format::Tensor kDroplessPackedInputs[] = {format::kX,
                                                    format::kRouterWeight,
                                                    format::kW1,
                                                    format::kW2,
                                                    format::kW1Scales,
                                                    format::kW2Scales,
                                                    format::kW1ZeroPoints,
                                                    format::kW2ZeroPoints,
                                                    format::kW1GlobalScales,
                                                    format::kW2GlobalScales,
                                                    format::kRouterBias,
                                                    format::kB1,
                                                    format::kB2,
                                                    format::kSelectionBias};
constexpr format::Tensor kExpertsPackedInputs[] = {format::kX,
                                                   format::kExpertIds,
                                                   format::kExpertWeights,
                                                   format::kW1,
                                                   format::kW2,
                                                   format::kW1Scales,
                                                   format::kW2Scales,
                                                   format::kW1ZeroPoints,
                                                   format::kW2ZeroPoints,
                                                   format::kW1GlobalScales,
                                                   format::kW2GlobalScales,
                                                   format::kB1,
                                                   format::kB2};
static_assert(std::size(kDroplessPackedInputs) == kMaxInputs);
static_assert(std::size(kExpertsPackedInputs) <= kMaxInputs);

constexpr std::uint32_t kFloats =
    1U << format::kFloat32 | 1U << format::kFloat16 | 1U << format::kBfloat16;

bool IsGlobalScales(format::Tensor tensor) {
  return tensor == format::kW1GlobalScales || tensor == format::kW2GlobalScales;
}

Status CheckSoftcap(const char* attribute, float number) {
  if (number < format::kLeastSoftcap || number > format::kMostSoftcap) {
    return InvalidArgument("attribute ", attribute, " must be ", format::kSoftcapRule,
                           " with activation softcapped_silu, got ", number);
  }
  return {};
}

// Of each expert's matrix, (out, in) or, where it lies transposed, (in, out).
Shape MatrixShape(std::int64_t experts, std::int64_t out, std::int64_t in, bool transposed) {
  return transposed ? Shape{{experts, in, out}, 3} : Shape{{experts, out, in}, 3};
}

// One scale or zero point for each block of each expert's matrix.
Shape ScalesShape(const dynamo_moe_layer& layer, std::int64_t out, std::int64_t in) {
  return {
      {layer.experts, static_cast<std::int64_t>(BlockRows(layer, static_cast<std::uint64_t>(out))),
       static_cast<std::int64_t>(BlockColumns(layer, static_cast<std::uint64_t>(in)))},
      3};
}

Shape ZeroPointsShape(const dynamo_moe_layer& layer, std::int64_t out, std::int64_t in) {
  return layer.zero_points == format::kOneForEachScale ? ScalesShape(layer, out, in)
                                                       : Shape{{layer.experts, 1, 1}, 3};
}

bool LiesInFile(format::Tensor tensor) {
  return tensor == format::kW1 || tensor == format::kW1Scales || tensor == format::kW2 ||
         tensor == format::kW2Scales || IsZeroPoints(tensor) || IsGlobalScales(tensor);
}

}  // namespace

bool IsZeroPoints(format::Tensor tensor) {
  return tensor == format::kW1ZeroPoints || tensor == format::kW2ZeroPoints;
}

const char* NameOf(const Node& node) {
  if (node.packed) {
    return node.op == format::kDropless ? "DroplessMoEPacked" : "DroplessMoEExpertsPacked";
  }
  return node.op == format::kDropless ? "DroplessMoE" : "DroplessMoEExperts";
}

Node NodeOf(const dynamo_moe_layer& layer) {
  return {static_cast<format::Operator>(layer.op), FormatOf(layer).IsPacked()};
}

Span<format::Tensor> InputsOf(const Node& node) {
  if (node.packed) {
    return node.op == format::kDropless
               ? Span<format::Tensor>(kDroplessPackedInputs, std::size(kDroplessPackedInputs))
               : Span<format::Tensor>(kExpertsPackedInputs, std::size(kExpertsPackedInputs));
  }
  return node.op == format::kDropless
             ? Span<format::Tensor>(kDroplessInputs, std::size(kDroplessInputs))
             : Span<format::Tensor>(kExpertsInputs, std::size(kExpertsInputs));
}

bool IsIgnored(const dynamo_moe_layer& layer, format::Tensor tensor) {
  return (IsZeroPoints(tensor) && !FormatOf(layer).has_zero_points) ||
         (IsGlobalScales(tensor) && !FormatOf(layer).has_global_scales);
}

bool IsOptional(format::Tensor tensor) {
  return tensor == format::kRouterBias || tensor == format::kSelectionBias ||
         tensor == format::kB1 || tensor == format::kB2 || IsZeroPoints(tensor) ||
         IsGlobalScales(tensor);
}

std::size_t RequiredInputs(const Node& node) {
  const Span<format::Tensor> inputs = InputsOf(node);
  return static_cast<std::size_t>(std::find_if(inputs.begin(), inputs.end(), &IsOptional) -
                                  inputs.begin());
}

const char* NameOf(format::Tensor tensor) {
  return tensor < format::kTensors ? format::kTensorNames[tensor] : "no tensor";
}

const char* DtypeName(std::uint32_t code) { return format::kDataTypeNames[code]; }

std::uint32_t DtypesOf(const dynamo_moe_layer& layer, format::Tensor tensor) {
  switch (tensor) {
    case format::kExpertIds:
      return 1U << format::kI32 | 1U << format::kI64;
    case format::kW1:
    case format::kW2:
      return FormatOf(layer).IsPacked() ? 1U << FormatOf(layer).values : kFloats;
    case format::kW1Scales:
    case format::kW2Scales:
      return FormatOf(layer).scales;
    case format::kW1ZeroPoints:
    case format::kW2ZeroPoints:
      return 1U << format::kI8;
    case format::kW1GlobalScales:
    case format::kW2GlobalScales:
      return 1U << format::kFloat32;
    default:
      return kFloats;
  }
}

bool HasFlag(const dynamo_moe_layer& layer, std::uint32_t flag) {
  return (layer.flags & flag) != 0;
}

Shape ShapeOf(const dynamo_moe_layer& layer, format::Tensor tensor) {
  if (layer.resident_experts != 0 && LiesInFile(tensor)) {
    // In place of what lies in a file.
    const bool one = IsZeroPoints(tensor) && layer.zero_points == format::kOneForEachExpert;
    return one ? Shape{{1, 1, 1}, 3} : Shape{{1}, 1};
  }
  const std::int64_t experts = layer.experts;
  const std::int64_t width = layer.width;
  const std::int64_t hidden = layer.hidden;
  const std::int64_t rows = HasFlag(layer, format::kGated) ? 2 * hidden : hidden;
  const std::int64_t per_element = FormatOf(layer).per_element;
  switch (tensor) {
    case format::kRouterWeight:
      return {{experts, width}, 2};
    case format::kRouterBias:
    case format::kSelectionBias:
      return {{experts}, 1};
    case format::kW1:
      return MatrixShape(experts, rows, width / per_element, HasFlag(layer, format::kW1Transposed));
    case format::kW1Scales:
      return ScalesShape(layer, rows, width);
    case format::kW1ZeroPoints:
      return ZeroPointsShape(layer, rows, width);
    case format::kW1GlobalScales:
      return {{experts, rows, 1}, 3};
    case format::kB1:
      return {{experts, rows}, 2};
    case format::kW2:
      return MatrixShape(experts, width, hidden / per_element,
                         HasFlag(layer, format::kW2Transposed));
    case format::kW2Scales:
      return ScalesShape(layer, width, hidden);
    case format::kW2ZeroPoints:
      return ZeroPointsShape(layer, width, hidden);
    case format::kW2GlobalScales:
      return {{experts, width, 1}, 3};
    case format::kB2:
      return {{experts, width}, 2};
    default:
      return {{}, 0};
  }
}

Status ReadPackedFormat(const std::string& given, std::uint32_t* weight_format) {
  std::string known;
  for (std::uint32_t code = 1; code < std::size(format::kWeightFormats); ++code) {
    const format::WeightFormat& weights = format::kWeightFormats[code];
    if (weights.IsPacked() && given == weights.name) {
      *weight_format = code;
      return {};
    }
    if (weights.IsPacked()) {
      known += Text(known.empty() ? "" : ", ", weights.name);
    }
  }
  return InvalidArgument("attribute ", kWeightFormat, " must be one of ", known, "; got '",
                         Printable(given), "'");
}

bool HasOption(const Node& node, const format::Option& option) {
  return (!option.router || node.op == format::kDropless) && !(option.plain && node.packed);
}

Status CheckNumber(const format::Option& option, float number) {
  if (!std::isfinite(number)) {
    return InvalidArgument("attribute ", option.attribute, " must be finite, got ", number);
  }
  if (option.rule != nullptr && !(number >= option.least)) {
    return InvalidArgument("attribute ", option.attribute, " must be ", option.rule, ", got ",
                           number);
  }
  return {};
}

Status ReadName(const format::Option& option, const std::string& given, std::uint32_t* code) {
  std::string known;
  for (std::uint32_t i = 0; i < option.count; ++i) {
    if (given == option.names[i]) {
      *code = i;
      return {};
    }
    known += Text(i == 0 ? "" : ", ", option.names[i]);
  }
  return InvalidArgument("attribute ", option.attribute, " must be one of ", known, "; got '",
                         Printable(given), "'");
}

Status CompleteOptions(dynamo_moe_layer* layer) {
  const bool gating = format::IsGating(layer->activation);
  const bool gated = (layer->flags & format::kGated) != 0;
  if (!gated && (gating || (layer->flags & format::kInterleaved) != 0)) {
    return gating ? InvalidArgument("activation ", format::kActivationNames[layer->activation],
                                    " needs attribute gated")
                  : InvalidArgument("attribute interleaved needs attribute gated");
  }
  if (layer->activation == format::kSoftcappedSilu) {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckSoftcap("activation_alpha", layer->alpha));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckSoftcap("activation_limit", layer->limit));
  }
  if (layer->group_scoring == format::kNoGroups && layer->n_group > 1) {
    return InvalidArgument("attribute n_group needs attribute group_scoring");
  }
  if (const std::string error = GroupsError(*layer); !error.empty()) {
    return InvalidArgument("attribute ", error);
  }
  // A token may choose among all experts.
  if (layer->n_group == layer->topk_group) {
    layer->group_scoring = format::kNoGroups;
  }
  for (const format::Option& option : format::kOptions) {
    if (!HasEffect(*layer, option)) {
      SetCode(option, 0, layer);
    }
  }
  return {};
}

std::string Printable(std::string_view text, std::size_t longest) {
  std::string printable(text.substr(0, longest));
  for (char& each : printable) {
    if (static_cast<unsigned char>(each) < 32 || each == 127) {
      each = '?';
    }
  }
  return printable + (text.size() > longest ? "..." : "");
}

}  // namespace dynamo_moe
