// Makes plugins of one operator, for TensorRT's registry.
#pragma once

#include "format.h"
#include "plugin.h"
#include "tensorrt_abi.h"

namespace dynamo_moe::plugin {

class Creator final : public nvinfer1::IPluginCreatorV3One {
 public:
  explicit Creator(format::Operator op) : op_(op) {}

  nvinfer1::IPluginV3* createPlugin(const char* name, const nvinfer1::PluginFieldCollection* fields,
                                    nvinfer1::TensorRTPhase phase) noexcept override;
  const nvinfer1::PluginFieldCollection* getFieldNames() noexcept override {
    return &AttributeFields(op_);
  }
  const char* getPluginName() const noexcept override { return NameOf(op_); }
  const char* getPluginVersion() const noexcept override { return kVersion; }
  const char* getPluginNamespace() const noexcept override { return kNamespace; }

 private:
  format::Operator op_;
};

}  // namespace dynamo_moe::plugin
