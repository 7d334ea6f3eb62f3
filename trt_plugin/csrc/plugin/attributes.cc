#include "plugin/attributes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <utility>

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();
constexpr float kDefaultAlpha = 1.702F;
constexpr float kDefaultLimit = 7.0F;
constexpr float kDefaultNormEps = 1e-6F;

constexpr const char* kNormNames[] = {"none", "rms"};

// The router's attributes come last: DroplessMoEExperts does not have them.
constexpr std::array kSpecs = {
    std::pair{"top_k", PluginFieldType::kINT32},
    std::pair{"num_experts", PluginFieldType::kINT32},
    std::pair{"in_features", PluginFieldType::kINT32},
    std::pair{"hidden_features", PluginFieldType::kINT32},
    std::pair{"activation", PluginFieldType::kCHAR},
    std::pair{"gated", PluginFieldType::kINT32},
    std::pair{"interleaved", PluginFieldType::kINT32},
    std::pair{"weight_on_input", PluginFieldType::kINT32},
    std::pair{"activation_alpha", PluginFieldType::kFLOAT32},
    std::pair{"activation_limit", PluginFieldType::kFLOAT32},
    std::pair{"pre_norm", PluginFieldType::kCHAR},
    std::pair{"norm_eps", PluginFieldType::kFLOAT32},
    std::pair{"residual", PluginFieldType::kINT32},
    std::pair{"kernels", PluginFieldType::kCHAR},
    std::pair{"scoring", PluginFieldType::kCHAR},
    std::pair{"renormalize", PluginFieldType::kINT32},
    std::pair{"routed_scaling", PluginFieldType::kFLOAT32},
};
constexpr std::size_t kRouterSpecs = 3;

std::size_t SpecCount(format::Operator op) {
  return op == format::kDropless ? kSpecs.size() : kSpecs.size() - kRouterSpecs;
}

const char* TypeName(PluginFieldType type) {
  switch (type) {
    case PluginFieldType::kINT32:
      return "INT32";
    case PluginFieldType::kFLOAT32:
      return "FLOAT32";
    case PluginFieldType::kCHAR:
      return "CHAR";
    default:
      return "another type";
  }
}

// The given fields by their place in kSpecs.
class Fields {
 public:
  explicit Fields(format::Operator op) : op_(op) {}

  Status Add(const PluginFieldCollection& given) {
    if (given.nbFields < 0 || (given.nbFields > 0 && given.fields == nullptr)) {
      return InvalidArgument("the plugin has ", given.nbFields, " fields, which are null");
    }
    for (std::int32_t i = 0; i < given.nbFields; ++i) {
      DYNAMO_MOE_RETURN_IF_ERROR(Add(given.fields[i]));
    }
    return {};
  }

  Status Integer(const char* name, std::int64_t low, std::int64_t high,
                 std::uint32_t* value) const {
    const PluginField* const field = Find(name);
    if (field == nullptr) {
      return InvalidArgument("attribute ", name, " is missing");
    }
    const std::int32_t given = *static_cast<const std::int32_t*>(field->data);
    if (given < low || given > high) {
      return InvalidArgument("attribute ", name, " must be in ", low, "..", high, ", got ", given);
    }
    *value = static_cast<std::uint32_t>(given);
    return {};
  }

  Status Size(const char* name, std::uint32_t* value) const {
    DYNAMO_MOE_RETURN_IF_ERROR(Integer(name, format::kSizeMultiple, kMaxSize, value));
    if (*value % format::kSizeMultiple != 0) {
      return InvalidArgument("attribute ", name, " must be a multiple of ", format::kSizeMultiple,
                             ", got ", *value);
    }
    return {};
  }

  // Sets the bit where the attribute is 1, or by default.
  Status Flag(const char* name, bool by_default, std::uint32_t bit, std::uint32_t* flags) const {
    std::uint32_t value = by_default ? 1 : 0;
    if (Find(name) != nullptr) {
      DYNAMO_MOE_RETURN_IF_ERROR(Integer(name, 0, 1, &value));
    }
    *flags |= value != 0 ? bit : 0;
    return {};
  }

  Status Number(const char* name, float* value) const {
    const PluginField* const field = Find(name);
    if (field == nullptr) {
      return {};
    }
    *value = *static_cast<const float*>(field->data);
    return std::isfinite(*value)
               ? Status()
               : InvalidArgument("attribute ", name, " must be finite, got ", *value);
  }

  template <std::size_t count>
  Status Choice(const char* name, const char* const (&choices)[count], std::uint32_t* value) const {
    const PluginField* const field = Find(name);
    if (field == nullptr) {
      return {};
    }
    const std::string given = TextOf(*field);
    std::string known;
    for (std::size_t i = 0; i < count; ++i) {
      if (given == choices[i]) {
        *value = static_cast<std::uint32_t>(i);
        return {};
      }
      known += Text(i == 0 ? "" : ", ", choices[i]);
    }
    return InvalidArgument("attribute ", name, " must be one of ", known, "; got '",
                           Printable(given), "'");
  }

  std::string TextAt(const char* name) const {
    const PluginField* const field = Find(name);
    return field == nullptr ? "" : TextOf(*field);
  }

 private:
  Status Add(const PluginField& field) {
    if (field.name == nullptr) {
      return InvalidArgument("a field has no name");
    }
    const std::string name = Printable(field.name);
    std::string known;
    for (std::size_t i = 0; i < SpecCount(op_); ++i) {
      if (std::string_view(kSpecs[i].first) == field.name) {
        if (found_[i] != nullptr) {
          return InvalidArgument("attribute ", name, " is given twice");
        }
        found_[i] = &field;
        return CheckType(field, kSpecs[i].second);
      }
      known += Text(i == 0 ? "" : ", ", kSpecs[i].first);
    }
    return InvalidArgument("unknown attribute ", name, "; known are ", known);
  }

  static Status CheckType(const PluginField& field, PluginFieldType type) {
    const bool text = type == PluginFieldType::kCHAR;
    if (field.type != type || field.length < (text ? 0 : 1) || (!text && field.length != 1)) {
      return InvalidArgument("attribute ", field.name, " must be ", text ? "a text of " : "one ",
                             TypeName(type), ", got ", field.length, " of ", TypeName(field.type),
                             " (", static_cast<int>(field.type), ")");
    }
    if (field.data == nullptr && field.length > 0) {
      return InvalidArgument("attribute ", field.name, " has no data");
    }
    return {};
  }

  const PluginField* Find(std::string_view name) const {
    for (std::size_t i = 0; i < kSpecs.size(); ++i) {
      if (kSpecs[i].first == name) {
        return found_[i];
      }
    }
    return nullptr;
  }

  // With or without a terminator.
  static std::string TextOf(const PluginField& field) {
    std::string text(static_cast<const char*>(field.data), static_cast<std::size_t>(field.length));
    while (!text.empty() && text.back() == '\0') {
      text.pop_back();
    }
    return text;
  }

  format::Operator op_;
  std::array<const PluginField*, kSpecs.size()> found_ = {};
};

Status ReadRouter(const Fields& fields, dynamo_moe_layer* layer) {
  if (layer->top_k > layer->experts) {
    return InvalidArgument("attribute top_k must be at most num_experts, ", layer->experts,
                           ", got ", layer->top_k);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Choice("scoring", format::kScoringNames, &layer->scoring));
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Flag("renormalize", true, format::kRenormalize, &layer->flags));
  if (layer->scoring == format::kTopkSoftmax) {
    layer->flags &= ~static_cast<std::uint32_t>(format::kRenormalize);
  }
  layer->routed_scaling = 1;
  return fields.Number("routed_scaling", &layer->routed_scaling);
}

Status ReadActivation(const Fields& fields, dynamo_moe_layer* layer) {
  DYNAMO_MOE_RETURN_IF_ERROR(
      fields.Choice("activation", format::kActivationNames, &layer->activation));
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Flag("gated", false, format::kGated, &layer->flags));
  DYNAMO_MOE_RETURN_IF_ERROR(
      fields.Flag("interleaved", false, format::kInterleaved, &layer->flags));
  DYNAMO_MOE_RETURN_IF_ERROR(
      fields.Flag("weight_on_input", false, format::kWeightOnInput, &layer->flags));
  float alpha = kDefaultAlpha;
  float limit = kDefaultLimit;
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Number("activation_alpha", &alpha));
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Number("activation_limit", &limit));
  if (!(limit > 0)) {
    return InvalidArgument("attribute activation_limit must be positive, got ", limit);
  }
  const bool clamped = format::IsClamped(layer->activation);
  const bool gated = (layer->flags & format::kGated) != 0;
  if (!gated && (clamped || (layer->flags & format::kInterleaved) != 0)) {
    return clamped ? InvalidArgument("activation ", format::kActivationNames[layer->activation],
                                     " needs attribute gated")
                   : InvalidArgument("attribute interleaved needs attribute gated");
  }
  if (layer->activation == format::kClampedSwiglu) {
    layer->alpha = alpha;
  }
  if (clamped) {
    layer->limit = limit;
  }
  return {};
}

Status ReadNorm(const Fields& fields, dynamo_moe_layer* layer) {
  std::uint32_t norm = 0;
  float eps = kDefaultNormEps;
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Choice("pre_norm", kNormNames, &norm));
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Number("norm_eps", &eps));
  // A smaller number may become 0 in a kernel, and make the scale of a row of zeros infinite.
  if (!(eps >= std::numeric_limits<float>::min())) {
    return InvalidArgument("attribute norm_eps must be positive and a normal number, got ", eps);
  }
  if (norm != 0) {
    layer->flags |= format::kRmsNorm;
    layer->norm_eps = eps;
  }
  return fields.Flag("residual", false, format::kResidual, &layer->flags);
}

}  // namespace

const char* NameOf(format::Operator op) {
  return op == format::kDropless ? "DroplessMoE" : "DroplessMoEExperts";
}

std::string Describe(const dynamo_moe_layer& layer) {
  std::string text = Text("num_experts=", layer.experts, " top_k=", layer.top_k,
                          " in_features=", layer.width, " hidden_features=", layer.hidden,
                          " activation=", format::kActivationNames[layer.activation]);
  const auto flag = [&](const char* name, std::uint32_t bit) {
    text += Text(" ", name, "=", (layer.flags & bit) != 0 ? 1 : 0);
  };
  flag("gated", format::kGated);
  flag("interleaved", format::kInterleaved);
  flag("weight_on_input", format::kWeightOnInput);
  flag("residual", format::kResidual);
  if ((layer.flags & format::kRmsNorm) != 0) {
    text += Text(" pre_norm=rms norm_eps=", layer.norm_eps);
  }
  if (layer.activation == format::kClampedSwiglu) {
    text += Text(" activation_alpha=", layer.alpha);
  }
  if (format::IsClamped(layer.activation)) {
    text += Text(" activation_limit=", layer.limit);
  }
  if (layer.op == format::kDropless) {
    flag("renormalize", format::kRenormalize);
    text += Text(" scoring=", format::kScoringNames[layer.scoring],
                 " routed_scaling=", layer.routed_scaling);
  }
  return text;
}

const PluginFieldCollection& AttributeFields(format::Operator op) {
  static const std::array fields = [] {
    std::array<PluginField, kSpecs.size()> all;
    std::transform(kSpecs.begin(), kSpecs.end(), all.begin(), [](const auto& spec) {
      return PluginField{spec.first, nullptr, spec.second, 1};
    });
    return all;
  }();
  static const PluginFieldCollection dropless = {static_cast<std::int32_t>(kSpecs.size()),
                                                 fields.data()};
  static const PluginFieldCollection experts = {
      static_cast<std::int32_t>(kSpecs.size() - kRouterSpecs), fields.data()};
  return op == format::kDropless ? dropless : experts;
}

Status ReadAttributes(format::Operator op, const PluginFieldCollection& fields,
                      Attributes* attributes) {
  Fields read(op);
  DYNAMO_MOE_RETURN_IF_ERROR(read.Add(fields));
  dynamo_moe_layer layer = {};
  layer.op = op;
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("num_experts", 1, format::kMaxExperts, &layer.experts));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("top_k", 1, format::kMaxTopK, &layer.top_k));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("in_features", &layer.width));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("hidden_features", &layer.hidden));
  DYNAMO_MOE_RETURN_IF_ERROR(ReadActivation(read, &layer));
  DYNAMO_MOE_RETURN_IF_ERROR(ReadNorm(read, &layer));
  if (op == format::kDropless) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadRouter(read, &layer));
  }
  *attributes = {layer, read.TextAt("kernels")};
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

}  // namespace dynamo_moe::plugin
