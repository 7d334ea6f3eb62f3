#include "plugin/attributes.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <vector>

#include "span.h"

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();

constexpr const char* kVersionNames[] = {"1", "2", "3", "4"};

constexpr PluginFieldType TypeOf(const format::Option& option) {
  if (option.type == format::Option::kName) {
    return PluginFieldType::kCHAR;
  }
  return option.type == format::Option::kFloat ? PluginFieldType::kFLOAT32
                                               : PluginFieldType::kINT32;
}

std::size_t IndexOf(Version version) {
  return (version.offloaded ? 1U : 0U) + (version.rare ? 2U : 0U);
}

std::vector<PluginField> MakeFields(const Node& node, Version version) {
  std::vector<PluginField> fields;
  const auto add = [&](const char* name, PluginFieldType type) {
    fields.push_back({name, nullptr, type, 1});
  };
  if (version.offloaded) {
    add(kResidentExperts, PluginFieldType::kINT32);
    add(kW1Source, PluginFieldType::kCHAR);
    add(kW2Source, PluginFieldType::kCHAR);
    add(kExpertCache, PluginFieldType::kINT32);
  }
  for (const format::Size& size : format::kSizes) {
    add(size.attribute, PluginFieldType::kINT32);
  }
  add("kernels", PluginFieldType::kCHAR);
  if (node.packed) {
    add(kWeightFormat, PluginFieldType::kCHAR);
    add(kBlockSize, PluginFieldType::kINT32);
    add(kBlockRows, PluginFieldType::kINT32);
  }
  for (const format::Option& option : format::kOptions) {
    if (HasOption(node, option) && (version.rare || !option.rare)) {
      add(option.attribute, TypeOf(option));
    }
  }
  return fields;
}

// The fields of a plugin, without data; they stay where they are.
Span<PluginField> FieldsOf(const Node& node, Version version) {
  constexpr std::size_t kNodes = 4;
  static const auto* const all = [] {
    auto* const made = new std::vector<PluginField>[kNodes * std::size(kVersions)];
    std::size_t index = 0;
    for (const Version each : kVersions) {
      for (const format::Operator op : {format::kDropless, format::kExpertsOnly}) {
        for (const bool packed : {false, true}) {
          made[index++] = MakeFields({op, packed}, each);
        }
      }
    }
    return made;
  }();
  const std::size_t index = IndexOf(version) * kNodes + (node.op == format::kDropless ? 0U : 2U) +
                            (node.packed ? 1U : 0U);
  return {all[index].data(), all[index].size()};
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
  Fields(const Node& node, Version version)
      : known_(FieldsOf(node, version)), found_(known_.size()) {}

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
      DYNAMO_MOE_RETURN_IF_ERROR(ReadName(option, TextOf(*field), &code));
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
    for (std::size_t i = 0; i < known_.size(); ++i) {
      if (std::string_view(known_[i].name) == field.name) {
        if (found_[i] != nullptr) {
          return InvalidArgument("attribute ", name, " is given twice");
        }
        found_[i] = &field;
        return CheckType(field, known_[i].type);
      }
      known += Text(i == 0 ? "" : ", ", known_[i].name);
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
    for (std::size_t i = 0; i < known_.size(); ++i) {
      if (known_[i].name == name) {
        return found_[i];
      }
    }
    return nullptr;
  }

  Span<PluginField> known_;
  std::vector<const PluginField*> found_;
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

Status ReadStorage(const Fields& fields, dynamo_moe_layer* layer) {
  DYNAMO_MOE_RETURN_IF_ERROR(ReadPackedFormat(fields.TextAt(kWeightFormat), &layer->weight_format));
  DYNAMO_MOE_RETURN_IF_ERROR(fields.Integer(kBlockSize, 0, kMaxSize, &layer->block_columns));
  layer->block_rows = 1;
  return fields.Has(kBlockRows) ? fields.Integer(kBlockRows, 0, kMaxSize, &layer->block_rows)
                                : Status();
}

// A block as large as both matrices is as good as one that is larger.
void NormalizeBlock(dynamo_moe_layer* layer) {
  const std::uint64_t gates = (layer->flags & format::kGated) != 0 ? 2 : 1;
  const std::uint64_t rows = std::max(gates * layer->hidden, std::uint64_t{layer->width});
  layer->block_rows = layer->block_rows >= rows ? 0 : layer->block_rows;
  layer->block_columns =
      layer->block_columns >= std::max(layer->width, layer->hidden) ? 0 : layer->block_columns;
}

Status ReadOptions(const Fields& fields, dynamo_moe_layer* layer) {
  for (const format::Option& option : format::kOptions) {
    if (HasOption(NodeOf(*layer), option)) {
      DYNAMO_MOE_RETURN_IF_ERROR(fields.Read(option, layer));
    }
  }
  return CompleteOptions(layer);
}

}  // namespace

const char* NameOf(Version version) { return kVersionNames[IndexOf(version)]; }

Version VersionOf(const dynamo_moe_layer& layer) {
  const bool rare = std::any_of(
      std::begin(format::kOptions), std::end(format::kOptions),
      [&](const format::Option& option) { return option.rare && CodeOf(layer, option) != 0; });
  return {layer.resident_experts != 0, rare};
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

PluginFieldCollection AttributeFields(const Node& node, Version version) {
  const Span<PluginField> fields = FieldsOf(node, version);
  return {static_cast<std::int32_t>(fields.size()), fields.begin()};
}

Status ReadAttributes(const Node& node, Version version, const PluginFieldCollection& fields,
                      Attributes* attributes) {
  Fields read(node, version);
  DYNAMO_MOE_RETURN_IF_ERROR(read.Add(fields));
  dynamo_moe_layer layer = {};
  layer.op = node.op;
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("num_experts", 1, format::kMaxExperts, &layer.experts));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Integer("top_k", 1, format::kMaxTopK, &layer.top_k));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("in_features", &layer.width));
  DYNAMO_MOE_RETURN_IF_ERROR(read.Size("hidden_features", &layer.hidden));
  if (node.op == format::kDropless && layer.top_k > layer.experts) {
    return InvalidArgument("attribute top_k must be at most num_experts, ", layer.experts, ", got ",
                           layer.top_k);
  }
  if (node.packed) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadStorage(read, &layer));
  }
  DYNAMO_MOE_RETURN_IF_ERROR(ReadOptions(read, &layer));
  if (node.packed) {
    NormalizeBlock(&layer);
  }
  *attributes = {layer, read.TextAt("kernels"), {}};
  return version.offloaded ? ReadOffload(read, attributes) : Status();
}

std::string TextOf(const PluginField& field) {
  std::string text(static_cast<const char*>(field.data), static_cast<std::size_t>(field.length));
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  return text;
}

}  // namespace dynamo_moe::plugin
