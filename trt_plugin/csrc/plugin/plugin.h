// The plugin of both operators: one object for TensorRT's build phase and its runtime phase.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <string>

#include "kernels/kernels.h"
#include "kernels/layer_bundle.h"
#include "node/inputs.h"
#include "plugin/attributes.h"
#include "plugin/sharing.h"
#include "plugin/tensorrt_abi.h"
#include "status.h"

namespace dynamo_moe::plugin {

inline constexpr const char* kNamespace = "";

// Names a layer's kernels in an engine.
struct StoredName {
  dynamo_moe_layer layer;
  dynamo_moe_key key;
};
static_assert(sizeof(StoredName) == 128);

// One object has all capabilities, since a clone copies all of them.
// NOLINTNEXTLINE(misc-multiple-inheritance)
class Plugin final : public nvinfer1::IPluginV3,
                     public nvinfer1::IPluginV3OneCore,
                     public nvinfer1::IPluginV3OneBuild,
                     public nvinfer1::IPluginV3OneRuntime {
 public:
  // For a layer of a network, from its attributes.
  static Status FromAttributes(const Node& node, Version version, const std::string& subject,
                               const nvinfer1::PluginFieldCollection& fields,
                               std::unique_ptr<Plugin>* plugin);
  // For a layer of an engine, from getFieldsToSerialize().
  static Status FromEngine(const Node& node, Version version, const std::string& subject,
                           const nvinfer1::PluginFieldCollection& fields,
                           std::unique_ptr<Plugin>* plugin);

  // IPluginV3
  nvinfer1::IPluginCapability* getCapabilityInterface(
      nvinfer1::PluginCapabilityType type) noexcept override;
  nvinfer1::IPluginV3* clone() noexcept override;

  // IPluginV3OneCore
  const char* getPluginName() const noexcept override { return NameOf(layer_->node); }
  const char* getPluginVersion() const noexcept override {
    return NameOf(VersionOf(layer_->attributes));
  }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

  // IPluginV3OneBuild
  std::int32_t configurePlugin(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                               const nvinfer1::DynamicPluginTensorDesc* out,
                               std::int32_t outputs) noexcept override;
  std::int32_t getOutputDataTypes(nvinfer1::DataType* output_types, std::int32_t outputs,
                                  const nvinfer1::DataType* input_types,
                                  std::int32_t inputs) const noexcept override;
  std::int32_t getOutputShapes(const nvinfer1::DimsExprs* input_shapes, std::int32_t inputs,
                               const nvinfer1::DimsExprs* shape_inputs, std::int32_t shapes,
                               nvinfer1::DimsExprs* output_shapes, std::int32_t outputs,
                               nvinfer1::IExprBuilder& builder) noexcept override;
  bool supportsFormatCombination(std::int32_t position,
                                 const nvinfer1::DynamicPluginTensorDesc* in_out,
                                 std::int32_t inputs, std::int32_t outputs) noexcept override;
  std::int32_t getNbOutputs() const noexcept override { return kOutputs; }
  std::size_t getWorkspaceSize(const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                               const nvinfer1::DynamicPluginTensorDesc* out,
                               std::int32_t outputs) const noexcept override;
  const char* getTimingCacheID() noexcept override { return layer_->timing_id.c_str(); }
  const char* getMetadataString() noexcept override { return layer_->description.c_str(); }

  // IPluginV3OneRuntime
  std::int32_t onShapeChange(const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                             const nvinfer1::PluginTensorDesc* out,
                             std::int32_t outputs) noexcept override;
  std::int32_t enqueue(const nvinfer1::PluginTensorDesc* input_descriptions,
                       const nvinfer1::PluginTensorDesc* output_descriptions,
                       const void* const* inputs, void* const* outputs, void* workspace,
                       cudaStream_t stream) noexcept override;
  nvinfer1::IPluginV3* attachToContext(nvinfer1::IPluginResourceContext* context) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldsToSerialize() noexcept override;

 private:
  // What a plugin's clones share.
  struct Layer {
    Node node;
    // The operator's and the layer's name, with which messages begin.
    std::string subject;
    // Only the attributes: no dtypes and biases.
    dynamo_moe_layer attributes;
    // Where its experts lie, if they are offloaded.
    Offload offload;
    // Null for a layer of an engine, which holds its kernels.
    std::shared_ptr<const LayerBundle> bundle;
    // With which layers it shares kernels; null: with none.
    std::shared_ptr<Sharing> sharing;
    std::string description;
    std::string timing_id;
    std::atomic<bool> has_warned = false;
  };

  Plugin() = default;
  Plugin(const Plugin&) = default;

  bool HasKernels(const NodeCall& call, std::int32_t position) const;
  // Returns the layer's kernels, or those that its engine stores with another layer.
  Status FindKernels(std::shared_ptr<const Kernels>* kernels) const;
  // Opens the cache of an offloaded layer's experts.
  Status RequireCache();
  bool IsOffloaded() const { return layer_->attributes.resident_experts != 0; }
  void WarnOfRefusal(const NodeCall& call, std::int32_t position) const;

  std::shared_ptr<Layer> layer_;
  // Null in the build phase until configurePlugin(), and until onShapeChange() if another layer of
  // the engine stores them.
  std::shared_ptr<const Kernels> kernels_;
  // Of this context; null until it is needed, and where all experts are resident.
  std::shared_ptr<Cache> cache_;
  // What the engine stores in place of kernels that another of its layers stores, and whether it
  // does.
  StoredName name_ = {};
  bool stores_name_ = false;
  std::int32_t stored_expert_cache_ = 0;
  std::array<nvinfer1::PluginField, 4> fields_;
  nvinfer1::PluginFieldCollection serialized_;
};

}  // namespace dynamo_moe::plugin
