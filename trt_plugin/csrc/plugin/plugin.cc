#include "plugin/plugin.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <string_view>
#include <utility>
#include <vector>

#include "plugin/inputs.h"
#include "plugin/log.h"

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::DataType;
using nvinfer1::DimsExprs;
using nvinfer1::DynamicPluginTensorDesc;
using nvinfer1::PluginCapabilityType;
using nvinfer1::PluginField;
using nvinfer1::PluginFieldCollection;
using nvinfer1::PluginFieldType;
using nvinfer1::PluginTensorDesc;
using nvinfer1::TensorFormat;

// The first field that an engine stores: a bundle of the layer's programs, which include the layer,
// or else the name of such a bundle that another layer of the engine stores.
constexpr const char* kProgramsField = "programs";
constexpr const char* kNameField = "programs_name";
// Where the experts are offloaded, three of the attributes follow.
constexpr std::int32_t kOffloadedFields = 4;

// The bytes of an engine's first field, and whether they are a name.
Status ReadField(const PluginFieldCollection& fields, std::string_view* bytes, bool* is_name) {
  const PluginField* const field = fields.fields;
  const bool has_one = (fields.nbFields == 1 || fields.nbFields == kOffloadedFields) &&
                       field != nullptr && field->name != nullptr;
  *is_name = has_one && std::string_view(field->name) == kNameField;
  if (!has_one || (!*is_name && std::string_view(field->name) != kProgramsField)) {
    return InvalidArgument("an engine's layer has one field, ", kProgramsField, " or ", kNameField,
                           "; got ", fields.nbFields, " fields, the first ",
                           fields.nbFields > 0 && field != nullptr && field->name != nullptr
                               ? Printable(field->name)
                               : "without a name",
                           ": was the engine built with another version of this library?");
  }
  if (field->type != PluginFieldType::kUNKNOWN || field->length < 1 || field->data == nullptr) {
    return InvalidArgument("field ", field->name, " must be bytes, got ", field->length,
                           " of type ", static_cast<std::int32_t>(field->type));
  }
  *bytes = {static_cast<const char*>(field->data), static_cast<std::size_t>(field->length)};
  return {};
}

// The other fields of a layer whose experts are offloaded.
Status ReadOffload(const PluginFieldCollection& fields, Offload* offload) {
  constexpr std::pair<const char*, PluginFieldType> kWanted[] = {
      {kW1Source, PluginFieldType::kCHAR},
      {kW2Source, PluginFieldType::kCHAR},
      {kExpertCache, PluginFieldType::kINT32}};
  const PluginField* field = fields.fields + 1;
  for (const auto& [name, type] : kWanted) {
    if (field->name == nullptr || std::string_view(field->name) != name || field->type != type ||
        field->length < 1 || field->data == nullptr) {
      return InvalidArgument("the fields of an engine's layer must be ", kProgramsField, " or ",
                             kNameField, ", ", kW1Source, ", ", kW2Source, " and ", kExpertCache,
                             ", got ", field->name == nullptr ? "none" : Printable(field->name),
                             " in the place of ", name);
    }
    ++field;
  }
  std::int32_t shared = 0;
  std::memcpy(&shared, fields.fields[3].data, sizeof(shared));
  if (shared != 0 && shared != 1) {
    return InvalidArgument("field ", kExpertCache, " must be in 0..1, got ", shared);
  }
  *offload = {TextOf(fields.fields[1]), TextOf(fields.fields[2]), shared != 0};
  return {};
}

// Of a profile.
std::int64_t MostTokens(const DynamicPluginTensorDesc& x) {
  return Tokens(DescriptionOf(x.max, x.desc.type));
}

Status NoKernels() {
  return InvalidArgument(
      "the layer has no kernels yet: configurePlugin() must come first, and succeed");
}

Status ReadName(std::string_view bytes, StoredName* name) {
  if (bytes.size() != sizeof(*name)) {
    return InvalidArgument("field ", kNameField, " must have ", sizeof(*name), " bytes, got ",
                           bytes.size(), ": build the engine with this version of the library");
  }
  std::memcpy(name, bytes.data(), sizeof(*name));
  return CheckLayer(name->layer);
}

}  // namespace

Status Plugin::FromAttributes(const Node& node, Version version, const std::string& subject,
                              const PluginFieldCollection& fields,
                              std::unique_ptr<Plugin>* plugin) {
  Attributes attributes;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadAttributes(node, version, fields, &attributes));
  auto layer = std::make_shared<Layer>();
  DYNAMO_MOE_RETURN_IF_ERROR(
      LayerBundle::Open(attributes.kernels, attributes.layer, &layer->bundle));
  layer->node = node;
  layer->subject = subject;
  layer->attributes = attributes.layer;
  layer->description = Describe(attributes.layer);
  layer->offload = std::move(attributes.offload);
  layer->sharing = Sharing::Current();
  layer->timing_id =
      Text(layer->description, " kernels=", Hexadecimal(layer->bundle->file().checksum()));
  plugin->reset(new Plugin());
  (*plugin)->layer_ = std::move(layer);
  return {};
}

Status Plugin::FromEngine(const Node& node, Version version, const std::string& subject,
                          const PluginFieldCollection& fields, std::unique_ptr<Plugin>* plugin) {
  std::string_view bytes;
  bool is_name = false;
  StoredName name = {};
  std::shared_ptr<const Kernels> kernels;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadField(fields, &bytes, &is_name));
  if (is_name) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadName(bytes, &name));
  } else {
    DYNAMO_MOE_RETURN_IF_ERROR(Kernels::Open(bytes, &kernels));
    name = {kernels->layer(), kernels->key()};
  }
  const Node stored = NodeOf(name.layer);
  if (stored.op != node.op || stored.packed != node.packed) {
    return InvalidArgument("field ", is_name ? kNameField : kProgramsField,
                           Text(" is of ", NameOf(stored)));
  }
  const Version wanted = VersionOf(name.layer);
  if (wanted.offloaded != version.offloaded || wanted.rare != version.rare) {
    return InvalidArgument("field ", is_name ? kNameField : kProgramsField,
                           " is of the plugin's version ", NameOf(wanted), ", not ",
                           NameOf(version));
  }
  auto layer = std::make_shared<Layer>();
  const bool offloaded = version.offloaded;
  if (offloaded != (fields.nbFields == kOffloadedFields)) {
    return InvalidArgument("an engine's layer has ", offloaded ? kOffloadedFields : 1,
                           " fields where its experts are ", offloaded ? "" : "not ",
                           "offloaded, got ", fields.nbFields);
  }
  if (offloaded) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadOffload(fields, &layer->offload));
  }
  layer->node = node;
  layer->subject = subject;
  layer->attributes = AttributesOf(name.layer);
  layer->description = Describe(layer->attributes);
  layer->timing_id = Text(layer->description, " kernels=", name.key.hash);
  plugin->reset(new Plugin());
  (*plugin)->layer_ = std::move(layer);
  (*plugin)->kernels_ = std::move(kernels);
  (*plugin)->name_ = name;
  (*plugin)->stores_name_ = is_name;
  return {};
}

nvinfer1::IPluginCapability* Plugin::getCapabilityInterface(PluginCapabilityType type) noexcept {
  switch (type) {
    case PluginCapabilityType::kCORE:
      return static_cast<nvinfer1::IPluginV3OneCore*>(this);
    case PluginCapabilityType::kBUILD:
      return static_cast<nvinfer1::IPluginV3OneBuild*>(this);
    case PluginCapabilityType::kRUNTIME:
      return static_cast<nvinfer1::IPluginV3OneRuntime*>(this);
  }
  return nullptr;
}

nvinfer1::IPluginV3* Plugin::clone() noexcept {
  auto* const copy = new (std::nothrow) Plugin(*this);
  if (copy == nullptr) {
    Log(tensorrt::Severity::kError, layer_->subject.c_str(), "the host's memory is exhausted");
    return nullptr;
  }
  // Each context opens its own.
  copy->cache_ = nullptr;
  return copy;
}

// --- Build phase ---

std::int32_t Plugin::getOutputDataTypes(DataType* output_types, std::int32_t outputs,
                                        const DataType* input_types,
                                        std::int32_t inputs) const noexcept {
  return Guard(layer_->subject.c_str(), [&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(layer_->node, inputs, outputs));
    output_types[0] = input_types[0];
    return {};
  });
}

std::int32_t Plugin::getOutputShapes(const DimsExprs* input_shapes, std::int32_t inputs,
                                     const DimsExprs* /*shape_inputs*/, std::int32_t shapes,
                                     DimsExprs* output_shapes, std::int32_t outputs,
                                     nvinfer1::IExprBuilder& /*builder*/) noexcept {
  return Guard(layer_->subject.c_str(), [&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(layer_->node, inputs, outputs));
    if (shapes != 0) {
      return InvalidArgument("the layer has no shape inputs, got ", shapes);
    }
    output_shapes[0] = input_shapes[0];
    return {};
  });
}

bool Plugin::supportsFormatCombination(std::int32_t position, const DynamicPluginTensorDesc* in_out,
                                       std::int32_t inputs, std::int32_t outputs) noexcept {
  bool supported = false;
  const int error = Guard(layer_->subject.c_str(), [&]() -> Status {
    NodeCall call = {};
    DYNAMO_MOE_RETURN_IF_ERROR(
        MakeCallUpTo(position, layer_->node, in_out, inputs, outputs, &call));
    if (in_out[position].desc.format != TensorFormat::kLINEAR) {
      return {};
    }
    supported = HasKernels(call, position);
    if (!supported) {
      WarnOfRefusal(call, position);
    }
    return {};
  });
  return error == 0 && supported;
}

bool Plugin::HasKernels(const NodeCall& call, std::int32_t position) const {
  return layer_->bundle == nullptr ? Matches(name_.layer, layer_->attributes, call, position)
                                   : layer_->bundle->Has(call, position);
}

// A strongly typed network asks only for its own dtypes, and fails if they are refused. For other
// networks, which may ask for any dtypes, one warning says what is supported.
void Plugin::WarnOfRefusal(const NodeCall& call, std::int32_t position) const {
  if (layer_->bundle == nullptr || layer_->has_warned.exchange(true)) {
    return;
  }
  if (const std::string missing = layer_->bundle->MissingInputs(call); !missing.empty()) {
    Log(tensorrt::Severity::kError, layer_->subject.c_str(),
        Text("the node has no input ", missing, "; ", layer_->bundle->KnownInputsText(),
             ": compile the kernels for this file")
            .c_str());
    return;
  }
  const format::Tensor tensor = call.tensor(position);
  const std::uint32_t code = call.at(position).dtype;
  const std::string text = Text("no kernels with ", NameOf(tensor), " ",
                                code == format::kNone ? "of another type" : DtypeName(code), "; ",
                                layer_->bundle->KnownInputsText());
  Log(tensorrt::Severity::kWarning, layer_->subject.c_str(), text.c_str());
}

std::int32_t Plugin::configurePlugin(const DynamicPluginTensorDesc* in, std::int32_t inputs,
                                     const DynamicPluginTensorDesc* out,
                                     std::int32_t outputs) noexcept {
  return Guard(layer_->subject.c_str(), [&]() -> Status {
    NodeCall call = {};
    DYNAMO_MOE_RETURN_IF_ERROR(MakeCall(layer_->node, in, inputs, out, outputs, &call));
    if (layer_->bundle == nullptr) {
      DYNAMO_MOE_RETURN_IF_ERROR(FindKernels(&kernels_));
      DYNAMO_MOE_RETURN_IF_ERROR(CheckCall(kernels_->layer(), call));
    } else {
      dynamo_moe_layer layer = layer_->attributes;
      DYNAMO_MOE_RETURN_IF_ERROR(CompleteLayer(call, &layer));
      DYNAMO_MOE_RETURN_IF_ERROR(layer_->bundle->Take(layer, &kernels_));
      if (IsOffloaded()) {
        // A file that is missing now will hardly be there later.
        std::shared_ptr<Cache> checked;
        DYNAMO_MOE_RETURN_IF_ERROR(Cache::Open(*kernels_, layer_->offload, &checked));
      }
    }
    // getWorkspaceSize() cannot fail, so a profile with too many tokens is refused here.
    std::size_t size = 0;
    return kernels_->WorkspaceSize(MostTokens(in[0]), &size);
  });
}

std::size_t Plugin::getWorkspaceSize(const DynamicPluginTensorDesc* in, std::int32_t inputs,
                                     const DynamicPluginTensorDesc* /*out*/,
                                     std::int32_t outputs) const noexcept {
  std::size_t size = 0;
  const int error = Guard(layer_->subject.c_str(), [&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(layer_->node, inputs, outputs));
    std::shared_ptr<const Kernels> kernels;
    DYNAMO_MOE_RETURN_IF_ERROR(FindKernels(&kernels));
    return kernels->WorkspaceSize(MostTokens(in[0]), &size);
  });
  return error == 0 ? size : 0;
}

Status Plugin::FindKernels(std::shared_ptr<const Kernels>* kernels) const {
  if (kernels_ != nullptr) {
    *kernels = kernels_;
    return {};
  }
  if (!stores_name_) {
    return NoKernels();
  }
  std::shared_ptr<const Kernels> named;
  DYNAMO_MOE_RETURN_IF_ERROR(Kernels::Find(name_.key, &named));
  if (named == nullptr || !SameLayer(named->layer(), name_.layer)) {
    return {DYNAMO_MOE_NOT_FOUND,
            "the kernels are stored with another layer of the engine, which is not loaded: build "
            "the engine anew with share_kernels=False of build_engine, or --no-share-kernels of "
            "dynamo-moe engine"};
  }
  *kernels = std::move(named);
  return {};
}

Status Plugin::RequireCache() {
  if (cache_ != nullptr || !IsOffloaded()) {
    return {};
  }
  return Cache::Open(*kernels_, layer_->offload, &cache_);
}

// --- Runtime phase ---

std::int32_t Plugin::onShapeChange(const PluginTensorDesc* in, std::int32_t inputs,
                                   const PluginTensorDesc* out, std::int32_t outputs) noexcept {
  return Guard(layer_->subject.c_str(), [&]() -> Status {
    NodeCall call = {};
    DYNAMO_MOE_RETURN_IF_ERROR(MakeCall(layer_->node, in, inputs, out, outputs, &call));
    DYNAMO_MOE_RETURN_IF_ERROR(FindKernels(&kernels_));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckCall(kernels_->layer(), call));
    DYNAMO_MOE_RETURN_IF_ERROR(RequireCache());
    // Does nothing if the kernels are already loaded. enqueue() is too late: it may be captured.
    if (cache_ == nullptr) {
      return kernels_->Prepare();
    }
    DYNAMO_MOE_RETURN_IF_ERROR(cache_->Prepare());
    if (const std::string text = cache_->TakeSummary("context"); !text.empty()) {
      Log(tensorrt::Severity::kInfo, layer_->subject.c_str(), text.c_str());
    }
    if (const std::string text = cache_->TakeWarning(); !text.empty()) {
      Log(tensorrt::Severity::kWarning, layer_->subject.c_str(), text.c_str());
    }
    return {};
  });
}

std::int32_t Plugin::enqueue(const PluginTensorDesc* input_descriptions,
                             const PluginTensorDesc* /*output_descriptions*/,
                             const void* const* inputs, void* const* outputs, void* workspace,
                             cudaStream_t stream) noexcept {
  return Guard(layer_->subject.c_str(), [&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(FindKernels(&kernels_));
    DYNAMO_MOE_RETURN_IF_ERROR(RequireCache());
    const PluginTensorDesc& x = input_descriptions[0];
    return kernels_->Enqueue(Tokens(DescriptionOf(x.dims, x.type)),
                             TensorsOf(kernels_->layer(), inputs, outputs[0]), workspace, stream,
                             cache_.get());
  });
}

nvinfer1::IPluginV3* Plugin::attachToContext(
    nvinfer1::IPluginResourceContext* /*context*/) noexcept {
  auto* const copy = static_cast<Plugin*>(clone());
  if (copy == nullptr || !IsOffloaded()) {
    return copy;
  }
  const int error = Guard(layer_->subject.c_str(), [&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(copy->FindKernels(&copy->kernels_));
    return copy->RequireCache();
  });
  if (error == 0) {
    return copy;
  }
  delete copy;
  return nullptr;
}

const PluginFieldCollection* Plugin::getFieldsToSerialize() noexcept {
  const Offload& offload = layer_->offload;
  const auto text = [](const char* name, const std::string& value) {
    return PluginField{name, value.data(), PluginFieldType::kCHAR,
                       static_cast<std::int32_t>(value.size())};
  };
  stored_expert_cache_ = offload.shared ? 1 : 0;
  fields_ = {PluginField{kProgramsField, nullptr, PluginFieldType::kUNKNOWN, 0},
             text(kW1Source, offload.w1_source), text(kW2Source, offload.w2_source),
             PluginField{kExpertCache, &stored_expert_cache_, PluginFieldType::kINT32, 1}};
  serialized_.nbFields = 0;
  serialized_.fields = fields_.data();
  Guard(layer_->subject.c_str(), [&]() -> Status {
    if (!stores_name_) {
      DYNAMO_MOE_RETURN_IF_ERROR(FindKernels(&kernels_));
      name_ = {kernels_->layer(), kernels_->key()};
    }
    const bool named =
        stores_name_ || (layer_->sharing != nullptr && !layer_->sharing->Stores(name_.key, layer_));
    const std::string_view bytes =
        named ? std::string_view(reinterpret_cast<const char*>(&name_), sizeof(name_))
              : kernels_->bytes();
    if (bytes.size() > std::numeric_limits<std::int32_t>::max()) {
      return InvalidArgument("the kernels have ", bytes.size(),
                             " bytes, an engine's field at most ",
                             std::numeric_limits<std::int32_t>::max());
    }
    fields_[0].name = named ? kNameField : kProgramsField;
    fields_[0].data = bytes.data();
    fields_[0].length = static_cast<std::int32_t>(bytes.size());
    serialized_.nbFields = IsOffloaded() ? kOffloadedFields : 1;
    return {};
  });
  return &serialized_;
}

}  // namespace dynamo_moe::plugin
