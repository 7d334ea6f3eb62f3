#include "bundle/layer.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstring>
#include <iterator>

#include "bundle/format.h"

namespace dynamo_moe {
namespace {

template <typename... Parts>
Status Wrong(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_BUNDLE, Text("the layer's ", parts...)};
}

static_assert(sizeof(dynamo_moe_layer) == 28 * sizeof(std::uint32_t));
static_assert(offsetof(dynamo_moe_layer, flags) == format::kFlagsWord * sizeof(std::uint32_t));
static_assert(std::size(format::kTensorNames) == format::kTensors);
static_assert(std::size(format::kSymbolNames) == format::kSymbols);
static_assert(std::size(format::kOpcodeNames) == format::kOpcodes);
static_assert(std::size(format::kGroupScoringNames) == format::kGroupScorings);

std::uint32_t WordOf(const dynamo_moe_layer& layer, std::uint32_t index) {
  std::uint32_t word = 0;
  std::memcpy(&word, reinterpret_cast<const char*>(&layer) + index * sizeof(word), sizeof(word));
  return word;
}

void SetWord(std::uint32_t index, const void* word, dynamo_moe_layer* layer) {
  constexpr std::size_t size = sizeof(std::uint32_t);
  std::memcpy(reinterpret_cast<char*>(layer) + index * size, word, size);
}

bool IsFloat(std::uint32_t type) {
  return type == format::kFloat32 || type == format::kFloat16 || type == format::kBfloat16;
}

bool Has(const dynamo_moe_layer& layer, std::uint32_t flag) { return (layer.flags & flag) != 0; }

// Adds the tensors that store a matrix of every expert; false if the bytes do not fit into 64 bits.
bool AddTensors(const dynamo_moe_layer& layer, const format::Tensor (&names)[4], std::uint64_t rows,
                std::uint64_t columns, std::vector<StoredTensor>* tensors) {
  const format::WeightFormat& weights = FormatOf(layer);
  const std::uint64_t block_rows = BlockRows(layer, rows);
  const std::uint64_t block_columns = BlockColumns(layer, columns);
  const bool for_each_scale = layer.zero_points == format::kOneForEachScale;
  const auto add = [&](format::Tensor name, std::uint64_t out, std::uint64_t in,
                       std::uint32_t dtype) {
    // An element has at most 8 bytes, and a row at most 2^32 elements.
    std::uint64_t bytes = in * format::kDataTypeBytes[dtype];
    const bool fits = !__builtin_mul_overflow(bytes, out, &bytes) &&
                      !__builtin_mul_overflow(bytes, std::uint64_t{layer.experts}, &bytes);
    tensors->push_back({name, bytes});
    return fits;
  };
  return add(names[0], rows, columns / weights.per_element, weights.values) &&
         (!weights.IsPacked() || add(names[1], block_rows, block_columns, layer.scales_dtype)) &&
         (layer.zero_points == format::kNoZeroPoints ||
          add(names[2], for_each_scale ? block_rows : 1, for_each_scale ? block_columns : 1,
              format::kI8)) &&
         (!weights.has_global_scales || add(names[3], rows, 1, format::kFloat32));
}

// Whether kernels share a scale among so many rows or columns; 0: all.
bool IsBlock(std::uint32_t size, std::uint32_t least) {
  return size == 0 || (size >= least && (size & (size - 1)) == 0);
}

Status CheckFormat(const dynamo_moe_layer& layer) {
  constexpr auto formats = static_cast<std::uint32_t>(std::size(format::kWeightFormats));
  if (layer.weight_format < 1 || layer.weight_format >= formats) {
    return Wrong("weight format must be in 1..", formats - 1, ", got ", layer.weight_format);
  }
  const format::WeightFormat& weights = FormatOf(layer);
  if (!weights.IsPacked() && layer.experts_dtype != weights.values) {
    return Wrong("experts must be ", format::kDataTypeNames[weights.values], " (", weights.values,
                 "), as weights of format ", weights.name, " are, got ", layer.experts_dtype);
  }
  if (!weights.IsPacked() && (layer.block_rows != 0 || layer.block_columns != 0)) {
    return Wrong("block must be 0 by 0, as weights of format ", weights.name, " have none, got ",
                 layer.block_rows, " by ", layer.block_columns);
  }
  if (weights.IsPacked() && layer.experts_dtype != layer.tokens_dtype) {
    return Wrong("experts must be ", format::kDataTypeNames[layer.tokens_dtype],
                 ", as the tokens of packed weights are, got ", layer.experts_dtype);
  }
  if (!IsBlock(layer.block_rows, 1) || !IsBlock(layer.block_columns, format::kSizeMultiple)) {
    return Wrong("block must have a power of two of rows and of columns, from ",
                 format::kSizeMultiple, " of these on, or all of them (0), got ", layer.block_rows,
                 " by ", layer.block_columns);
  }
  const bool known = layer.scales_dtype < std::size(format::kDataTypeNames);
  if (!known || (weights.IsPacked() ? ((weights.scales >> layer.scales_dtype) & 1) == 0
                                    : layer.scales_dtype != format::kNone)) {
    return Wrong("scales' dtype does not fit weights of format ", weights.name, ", got ",
                 layer.scales_dtype);
  }
  const std::uint32_t most = weights.has_zero_points ? format::kZeroPoints - 1 : 0;
  if (layer.zero_points > most) {
    return Wrong("zero points must be in 0..", most, " for weights of format ", weights.name,
                 ", got ", layer.zero_points);
  }
  if (layer.reserved[0] != 0 || layer.reserved[1] != 0) {
    return Wrong("reserved words must be 0");
  }
  return {};
}

Status CheckDtypes(const dynamo_moe_layer& layer, bool router) {
  const bool ints = layer.routing_dtype == format::kI32 || layer.routing_dtype == format::kI64;
  const bool no_bias = router && layer.weights_dtype == format::kNone;
  if (!IsFloat(layer.tokens_dtype) || !IsFloat(layer.experts_dtype)) {
    return Wrong("tokens and experts must be float32 (1), float16 (2) or bfloat16 (3), got ",
                 layer.tokens_dtype, " and ", layer.experts_dtype);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckFormat(layer));
  if (!(router ? IsFloat(layer.routing_dtype) : ints)) {
    return Wrong("routing dtype must be ",
                 router ? "float32 (1), float16 (2) or bfloat16 (3)" : "int32 (4) or int64 (5)",
                 ", got ", layer.routing_dtype);
  }
  if (!no_bias && !IsFloat(layer.weights_dtype)) {
    return Wrong(router ? "router bias" : "expert weights",
                 " must be float32 (1), float16 (2) or bfloat16 (3)",
                 router ? " or absent (0)" : "", ", got ", layer.weights_dtype);
  }
  if (layer.selection_dtype != format::kNone && !(router && IsFloat(layer.selection_dtype))) {
    return Wrong("selection bias must be ",
                 router ? "float32 (1), float16 (2), bfloat16 (3) or absent (0)" : "absent (0)",
                 ", got ", layer.selection_dtype);
  }
  return {};
}

Status CheckSizes(const dynamo_moe_layer& layer, bool router) {
  const std::uint32_t most = router ? std::min(format::kMaxTopK, layer.experts) : format::kMaxTopK;
  if (layer.experts < 1 || layer.experts > format::kMaxExperts) {
    return Wrong("experts must be in 1..", format::kMaxExperts, ", got ", layer.experts);
  }
  if (layer.top_k < 1 || layer.top_k > most) {
    return Wrong("top_k must be in 1..", most, ", got ", layer.top_k);
  }
  for (const std::uint32_t size : {layer.width, layer.hidden}) {
    if (size < format::kSizeMultiple || size % format::kSizeMultiple != 0) {
      return Wrong("width and hidden must be multiples of ", format::kSizeMultiple, ", got ",
                   layer.width, " and ", layer.hidden);
    }
  }
  if (layer.resident_experts > layer.experts) {
    return Wrong("resident experts must be in 0..", layer.experts, ", got ",
                 layer.resident_experts);
  }
  if (const std::string error = GroupsError(layer); !error.empty()) {
    return Wrong(error);
  }
  if (layer.group_scoring != format::kNoGroups && layer.topk_group == layer.n_group) {
    return Wrong("topk_group must be below n_group, got ", layer.topk_group, " for both");
  }
  return {};
}

Status CheckOptions(const dynamo_moe_layer& layer) {
  const bool gating = format::IsGating(layer.activation);
  if ((gating || Has(layer, format::kInterleaved)) && !Has(layer, format::kGated)) {
    return Wrong(gating ? "gating as activation" : "flag interleaved", " needs flag gated");
  }
  if (Has(layer, format::kHasTf32) && layer.experts_dtype != format::kFloat32) {
    return Wrong("flag tf32 does not apply and must be 0, got ", layer.flags & format::kHasTf32);
  }
  for (const format::Option& option : format::kOptions) {
    const bool number = option.type == format::Option::kFloat;
    const auto code = static_cast<double>(CodeOf(layer, option));
    const double value = number ? NumberOf(layer, option) : code;
    if (!std::isfinite(value)) {
      return Wrong(option.name, " must be finite, got ", value);
    }
    if (value != 0 && !HasEffect(layer, option)) {
      return Wrong(option.bit != 0 ? "flag " : "", option.name,
                   " does not apply and must be 0, got ", value);
    }
  }
  return {};
}

}  // namespace

std::uint32_t SizeOf(const dynamo_moe_layer& layer, const format::Size& size) {
  return WordOf(layer, size.word);
}

std::uint32_t CodeOf(const dynamo_moe_layer& layer, const format::Option& option) {
  const std::uint32_t word = WordOf(layer, option.word);
  if (option.bit == 0) {
    return word;
  }
  return (word & option.bit) != 0 ? 1 : 0;
}

float NumberOf(const dynamo_moe_layer& layer, const format::Option& option) {
  float number = 0;
  const std::uint32_t word = WordOf(layer, option.word);
  std::memcpy(&number, &word, sizeof(number));
  return number;
}

void SetCode(const format::Option& option, std::uint32_t code, dynamo_moe_layer* layer) {
  if (option.bit != 0) {
    const std::uint32_t others = WordOf(*layer, option.word) & ~option.bit;
    code = others | (code != 0 ? option.bit : 0);
  }
  SetWord(option.word, &code, layer);
}

void SetNumber(const format::Option& option, float number, dynamo_moe_layer* layer) {
  SetWord(option.word, &number, layer);
}

std::uint32_t PlainFormatOf(std::uint32_t dtype) {
  for (std::uint32_t code = 1; code < std::size(format::kWeightFormats); ++code) {
    const format::WeightFormat& known = format::kWeightFormats[code];
    if (!known.IsPacked() && known.values == dtype) {
      return code;
    }
  }
  return 0;
}

const format::WeightFormat& FormatOf(const dynamo_moe_layer& layer) {
  return format::kWeightFormats[layer.weight_format];
}

std::uint64_t BlockRows(const dynamo_moe_layer& layer, std::uint64_t rows) {
  return layer.block_rows == 0 ? 1 : (rows + layer.block_rows - 1) / layer.block_rows;
}

std::uint64_t BlockColumns(const dynamo_moe_layer& layer, std::uint64_t columns) {
  return layer.block_columns == 0 ? 1 : (columns + layer.block_columns - 1) / layer.block_columns;
}

bool StoredTensors(const dynamo_moe_layer& layer, std::vector<StoredTensor>* tensors) {
  const std::uint64_t gates = Has(layer, format::kGated) ? 2 : 1;
  return AddTensors(
             layer,
             {format::kW1, format::kW1Scales, format::kW1ZeroPoints, format::kW1GlobalScales},
             gates * layer.hidden, layer.width, tensors) &&
         AddTensors(
             layer,
             {format::kW2, format::kW2Scales, format::kW2ZeroPoints, format::kW2GlobalScales},
             layer.width, layer.hidden, tensors);
}

bool WeightBytes(const dynamo_moe_layer& layer, std::uint64_t* w1, std::uint64_t* w2) {
  std::vector<StoredTensor> tensors;
  bool fits = StoredTensors(layer, &tensors);
  *w1 = *w2 = 0;
  for (const StoredTensor& each : tensors) {
    std::uint64_t* const sum = each.tensor < format::kW2 ? w1 : w2;
    fits = fits && !__builtin_add_overflow(*sum, each.bytes, sum);
  }
  return fits;
}

bool HasEffect(const dynamo_moe_layer& layer, const format::Option& option) {
  if ((option.router && layer.op != format::kDropless) ||
      (option.plain && FormatOf(layer).IsPacked())) {
    return false;
  }
  return option.only_with < 0 ||
         ((option.codes >> CodeOf(layer, format::kOptions[option.only_with])) & 1) != 0;
}

std::string GroupsError(const dynamo_moe_layer& layer) {
  if (layer.group_scoring == format::kNoGroups) {
    return "";
  }
  const std::uint32_t least = layer.group_scoring == format::kTop2Sum ? 2 : 1;
  if (layer.n_group < 1 || layer.experts % layer.n_group != 0 ||
      layer.experts / layer.n_group < least) {
    return Text("n_group must divide ", layer.experts, " experts into groups of ", least,
                " up, got ", layer.n_group);
  }
  if (layer.topk_group < 1 || layer.topk_group > layer.n_group) {
    return Text("topk_group must be in 1..", layer.n_group, ", the groups, got ", layer.topk_group);
  }
  const std::uint32_t choice = layer.topk_group * (layer.experts / layer.n_group);
  if (layer.top_k > choice) {
    return Text("top_k must be in 1..", choice, ", the experts of ", layer.topk_group,
                " groups, got ", layer.top_k);
  }
  return "";
}

Status CheckLayer(const dynamo_moe_layer& layer) {
  if (layer.op >= format::kOperators) {
    return Wrong("operator must be below ", format::kOperators, ", got ", layer.op);
  }
  if (layer.flags > format::kLayerFlags) {
    return Wrong("flags must be below ", format::kLayerFlags + 1, ", got ", layer.flags);
  }
  for (const format::Option& option : format::kOptions) {
    if (option.type == format::Option::kName && CodeOf(layer, option) >= option.count) {
      return Wrong(option.name, " must be below ", option.count, ", got ", CodeOf(layer, option));
    }
  }
  const bool router = layer.op == format::kDropless;
  DYNAMO_MOE_RETURN_IF_ERROR(CheckDtypes(layer, router));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckSizes(layer, router));
  return CheckOptions(layer);
}

}  // namespace dynamo_moe
