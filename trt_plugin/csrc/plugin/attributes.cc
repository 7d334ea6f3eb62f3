#include "plugin/attributes.h"

#include <algorithm>
#include <iterator>
#include <vector>

#include "span.h"

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;

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
  add(kKernels, PluginFieldType::kCHAR);
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
class Fields final : public NodeAttributes {
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

  bool Integer(const char* name, std::int64_t* value) const override {
    const PluginField* const field = Find(name);
    if (field != nullptr) {
      *value = *static_cast<const std::int32_t*>(field->data);
    }
    return field != nullptr;
  }

  bool Number(const char* name, float* value) const override {
    const PluginField* const field = Find(name);
    if (field != nullptr) {
      *value = *static_cast<const float*>(field->data);
    }
    return field != nullptr;
  }

  bool Text(const char* name, std::string* value) const override {
    const PluginField* const field = Find(name);
    if (field != nullptr) {
      *value = TextOf(*field);
    }
    return field != nullptr;
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
      known += dynamo_moe::Text(i == 0 ? "" : ", ", known_[i].name);
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

}  // namespace

const char* NameOf(Version version) { return kVersionNames[IndexOf(version)]; }

Version VersionOf(const dynamo_moe_layer& layer) {
  const bool rare = std::any_of(
      std::begin(format::kOptions), std::end(format::kOptions),
      [&](const format::Option& option) { return option.rare && CodeOf(layer, option) != 0; });
  return {layer.resident_experts != 0, rare};
}

PluginFieldCollection AttributeFields(const Node& node, Version version) {
  const Span<PluginField> fields = FieldsOf(node, version);
  return {static_cast<std::int32_t>(fields.size()), fields.begin()};
}

Status ReadAttributes(const Node& node, Version version, const PluginFieldCollection& fields,
                      Attributes* attributes) {
  Fields read(node, version);
  DYNAMO_MOE_RETURN_IF_ERROR(read.Add(fields));
  *attributes = {};
  DYNAMO_MOE_RETURN_IF_ERROR(
      dynamo_moe::ReadAttributes(read, node, kKernelLimits, &attributes->layer));
  read.Text(kKernels, &attributes->kernels);
  return version.offloaded ? ReadOffload(read, &attributes->layer, &attributes->offload) : Status();
}

std::string TextOf(const PluginField& field) {
  std::string text(static_cast<const char*>(field.data), static_cast<std::size_t>(field.length));
  while (!text.empty() && text.back() == '\0') {
    text.pop_back();
  }
  return text;
}

}  // namespace dynamo_moe::plugin
