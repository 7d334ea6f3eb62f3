// What TensorRT calls when it loads this library, the creators that it then registers, and the part
// of the C interface that concerns plugins.
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "bundle/layer.h"
#include "dynamo_moe.h"
#include "guard.h"
#include "kernels/bundle_file.h"
#include "plugin/log.h"
#include "plugin/plugin.h"
#include "plugin/sharing.h"
#include "plugin/tensorrt_abi.h"

namespace dynamo_moe::plugin {
namespace {

using nvinfer1::TensorRTPhase;

// Makes plugins of one kind of node and version.
class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  Creator(const Node& node, Version version)
      : node_(node), version_(version), fields_(AttributeFields(node, version)) {}

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override { return &fields_; }
  const char* getPluginName() const noexcept override { return NameOf(node_); }
  const char* getPluginVersion() const noexcept override { return NameOf(version_); }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  Node node_;
  Version version_;
  nvinfer1::PluginFieldCollection fields_;
};

nvinfer1::IPluginV3* Creator::createPlugin(const char* name,
                                           const nvinfer1::PluginFieldCollection* fields,
                                           TensorRTPhase phase) noexcept {
  // Layers have the names of modules, which may be long.
  constexpr std::size_t kLongestName = 200;
  std::unique_ptr<Plugin> plugin;
  std::string subject;
  Guard(NameOf(node_), [&]() -> Status {
    subject = Text(NameOf(node_), " ", Printable(name == nullptr ? "" : name, kLongestName));
    return {};
  });
  Guard(subject.c_str(), [&]() -> Status {
    if (fields == nullptr) {
      return InvalidArgument("the fields must not be null");
    }
    switch (phase) {
      case TensorRTPhase::kBUILD:
        return Plugin::FromAttributes(node_, version_, subject, *fields, &plugin);
      case TensorRTPhase::kRUNTIME:
        return Plugin::FromEngine(node_, version_, subject, *fields, &plugin);
    }
    return InvalidArgument("unknown phase ", static_cast<std::int32_t>(phase));
  });
  return plugin.release();
}

}  // namespace
}  // namespace dynamo_moe::plugin

extern "C" DYNAMO_MOE_API void setLoggerFinder(void* finder) {
  dynamo_moe::plugin::SetLoggerFinder(finder);
}

extern "C" DYNAMO_MOE_API nvinfer1::IPluginCreatorInterface* const* getCreators(
    std::int32_t& count) {
  using dynamo_moe::Node;
  using dynamo_moe::format::kDropless;
  using dynamo_moe::format::kExpertsOnly;
  static const auto* const creators = [] {
    auto* const made = new std::vector<nvinfer1::IPluginCreatorInterface*>;
    for (const Node& node : {Node{kDropless, false}, Node{kExpertsOnly, false},
                             Node{kDropless, true}, Node{kExpertsOnly, true}}) {
      for (const dynamo_moe::plugin::Version version : dynamo_moe::plugin::kVersions) {
        made->push_back(new dynamo_moe::plugin::Creator(node, version));
      }
    }
    return made;
  }();
  count = static_cast<std::int32_t>(creators->size());
  return creators->data();
}

dynamo_moe_status dynamo_moe_kernels_begin(const char* name, const void* data, std::size_t size) {
  return dynamo_moe::Guard([&]() -> dynamo_moe::Status {
    using dynamo_moe::BundleFile;
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::NotNull(name, "name"));
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::NotNull(data, "data"));
    std::shared_ptr<BundleFile> bundle;
    DYNAMO_MOE_RETURN_IF_ERROR(
        BundleFile::FromBytes(name, {static_cast<const char*>(data), size}, &bundle));
    BundleFile::Give(std::move(bundle));
    return {};
  });
}

dynamo_moe_status dynamo_moe_kernels_end(void) {
  dynamo_moe::BundleFile::Give(nullptr);
  return DYNAMO_MOE_OK;
}

dynamo_moe_status dynamo_moe_sharing_begin(void) {
  return dynamo_moe::Guard([]() -> dynamo_moe::Status {
    dynamo_moe::plugin::Sharing::Begin();
    return {};
  });
}

dynamo_moe_status dynamo_moe_sharing_end(void) {
  dynamo_moe::plugin::Sharing::End();
  return DYNAMO_MOE_OK;
}
