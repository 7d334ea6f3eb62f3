#include "plugin/attributes.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <limits>

#include "span.h"

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

struct Spec {
  const char* name = nullptr;
  PluginFieldType type = PluginFieldType::kINT32;
};

constexpr PluginFieldType TypeOf(const format::Option& option) {
  if (option.type == format::Option::kName) {
    return PluginFieldType::kCHAR;
  }
  return option.type == format::Option::kFloat ? PluginFieldType::kFLOAT32
                                               : PluginFieldType::kINT32;
}

// What only offloaded layers have.
constexpr Spec kOffloadSpecs[] = {{kResidentExperts, PluginFieldType::kINT32},
                                  {kW1Source, PluginFieldType::kCHAR},
                                  {kW2Source, PluginFieldType::kCHAR},
                                  {kExpertCache, PluginFieldType::kINT32}};

// The attributes of offloaded layers come first and the router's last, so that each plugin's are
// neighbours.
constexpr auto kSpecs = [] {
  std::array<Spec,
             std::size(kOffloadSpecs) + std::size(format::kSizes) + 1 + std::size(format::kOptions)>
      specs{};
  std::size_t count = 0;
  for (const Spec& spec : kOffloadSpecs) {
    specs[count++] = spec;
  }
  for (const format::Size& size : format::kSizes) {
    specs[count++] = {size.attribute, PluginFieldType::kINT32};
  }
  specs[count++] = {"kernels", PluginFieldType::kCHAR};
  for (const bool router : {false, true}) {
    for (const format::Option& option : format::kOptions) {
      if (option.router == router) {
        specs[count++] = {option.attribute, TypeOf(option)};
      }
    }
  }
  return specs;
}();
constexpr std::size_t kRouterSpecs = [] {
  std::size_t count = 0;
  for (const format::Option& option : format::kOptions) {
    count += option.router ? 1 : 0;
  }
  return count;
}();

Span<Spec> SpecsOf(format::Operator op, Version version) {
  const std::size_t first = version == Version::kOffloaded ? 0 : std::size(kOffloadSpecs);
  const std::size_t end = kSpecs.size() - (op == format::kDropless ? 0 : kRouterSpecs);
  return {kSpecs.data() + first, end - first};
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

// The given fields by their place in the plugin's specs.
class Fields {
 public:
  Fields(format::Operator op, Version version) : specs_(SpecsOf(op, version)) {}

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

  // Sets an option to the attribute, or to its default.
  Status Read(const format::Option& option, dynamo_moe_layer* layer) const {
    const PluginField* const field = Find(option.attribute);
    if (option.type == format::Option::kFloat) {
      const float number =
          field == nullptr ? option.initial : *static_cast<const float*>(field->data);
      SetNumber(option, number, layer);
      return CheckNumber(option, number);
    }
    auto code = static_cast<std::uint32_t>(option.initial);
    if (field != nullptr && option.type == format::Option::kName) {
      DYNAMO_MOE_RETURN_IF_ERROR(Choice(option, TextOf(*field), &code));
    } else if (field != nullptr) {
      const bool flag = option.type == format::Option::kBool;
      const auto least = static_cast<std::int64_t>(option.least);
      DYNAMO_MOE_RETURN_IF_ERROR(Integer(option.attribute, least, flag ? 1 : kMaxSize, &code));
    }
    SetCode(option, code, layer);
    return {};
  }

  bool Has(const char* name) const { return Find(name) != nullptr; }

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
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (std::string_view(specs_[i].name) == field.name) {
        if (found_[i] != nullptr) {
          return InvalidArgument("attribute ", name, " is given twice");
        }
        found_[i] = &field;
        return CheckType(field, specs_[i].type);
      }
      known += Text(i == 0 ? "" : ", ", specs_[i].name);
    }
    return InvalidArgument("unknown attribute ", name, "; known are ", known);
  }

  static Status CheckNumber(const format::Option& option, float number) {
    if (!std::isfinite(number)) {
      return InvalidArgument("attribute ", option.attribute, " must be finite, got ", number);
    }
    if (option.rule != nullptr && !(number >= option.least)) {
      return InvalidArgument("attribute ", option.attribute, " must be ", option.rule, ", got ",
                             number);
    }
    return {};
  }

  static Status Choice(const format::Option& option, const std::string& given,
                       std::uint32_t* code) {
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
    for (std::size_t i = 0; i < specs_.size(); ++i) {
      if (specs_[i].name == name) {
        return found_[i];
      }
    }
    return nullptr;
  }

  Span<Spec> specs_;
  std::array<const PluginField*, kSpecs.size()> found_ = {};
};

// Completes attributes of a layer whose experts lie in host memory.
Status ReadOffload(const Fields& fields, Attributes* attributes) {
  dynamo_moe_layer& layer = attributes->layer;
  DYNAMO_MOE_RETURN_IF_ERROR(
      fields.Integer(kResidentExperts, 1, layer.experts, &layer.resident_experts));
  for (const char* const name : {kW1Source, kW2Source}) {
    if (!fields.Has(name)) {
      return InvalidArgument("attribute ", name, " is missing");
    }
  }
  std::uint32_t shared = 0;
  if (fields.Has(kExpertCache)) {
    DYNAMO_MOE_RETURN_IF_ERROR(fields.Integer(kExpertCache, 0, 1, &shared));
  }
  attributes->offload = {fields.TextAt(kW1Source), fields.TextAt(kW2Source), shared != 0};
  return {};
}

Status ReadOptions(const Fields& fields, dynamo_moe_layer* layer) {
  for (const format::Option& option : format::kOptions) {
    if (!option.router || layer->op == format::kDropless) {
      DYNAMO_MOE_RETURN_IF_ERROR(fields.Read(option, layer));
    }
  }
  const bool clamped = format::IsClamped(layer->activation);
  const bool gated = (layer->flags & format::kGated) != 0;
  if (!gated && (clamped || (layer->flags & format::kInterleaved) != 0)) {
    return clamped ? InvalidArgument("activation ", format::kActivationNames[layer->activation],
                                     " needs attribute gated")
                   : InvalidArgument("attribute interleaved needs attribute gated");
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

}  // namespace

const char* NameOf(format::Operator op) {
  return op == format::kDropless ? "DroplessMoE" : "DroplessMoEExperts";
}

const char* NameOf(Version version) { return version == Version::kOffloaded ? "2" : "1"; }

Version VersionOf(const dynamo_moe_layer& layer) {
  return layer.resident_experts != 0 ? Version::kOffloaded : Version::kResident;
}

std::string Describe(const dynamo_moe_layer& layer) {
  std::string text;
  for (const format::Size& size : format::kSizes) {
    text += Text(size.attribute, "=", SizeOf(layer, size), " ");
  }
  for (const format::Option& option : format::kOptions) {
    if (!HasEffect(layer, option)) {
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

PluginFieldCollection AttributeFields(format::Operator op, Version version) {
  static const std::array fields = [] {
    std::array<PluginField, kSpecs.size()> all;
    std::transform(kSpecs.begin(), kSpecs.end(), all.begin(),
                   [](const auto& spec) { return PluginField{spec.name, nullptr, spec.type, 1}; });
    return all;
  }();
  const Span<Spec> specs = SpecsOf(op, version);
  return {static_cast<std::int32_t>(specs.size()), fields.data() + (specs.begin() - kSpecs.data())};
}

Status ReadAttributes(format::Operator op, Version version, const PluginFieldCollection& fields,
                      Attributes* attributes) {
  Fields read(op, version);
  DYNAMO_MOE_RETURN_IF_ERROR(read.Add(fields));
  dynamo_moe_layer layer = {};
  layer.op = op;
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("num_experts", 1, format::kMaxExperts, &layer.experts));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("top_k", 1, format::kMaxTopK, &layer.top_k));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("in_features", &layer.width));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("hidden_features", &layer.hidden));
  if (op == format::kDropless && layer.top_k > layer.experts) {
    return InvalidArgument("attribute top_k must be at most num_experts, ", layer.experts, ", got ",
                           layer.top_k);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(ReadOptions(read, &layer));
  *attributes = {layer, read.TextAt("kernels"), {}};
  return version == Version::kOffloaded ? ReadOffload(read, attributes) : Status();
}

std::string TextOf(const PluginField& field) {
  std::string text(static_cast<const char*>(field.data), static_cast<std::size_t>(field.length));
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  return text;
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
