#include "plugin_creator.h"

#include <memory>
#include <string>

#include "plugin_log.h"

namespace dynamo_moe::plugin {

using nvinfer1::TensorRTPhase;

nvinfer1::IPluginV3* Creator::createPlugin(const char* name,
                                           const nvinfer1::PluginFieldCollection* fields,
                                           TensorRTPhase phase) noexcept {
  // Layers have the names of modules, which may be long.
  constexpr std::size_t kLongestName = 200;
  std::unique_ptr<Plugin> plugin;
  std::string subject;
  Guard(NameOf(op_), [&]() -> Status {
    subject = Text(NameOf(op_), " ", Printable(name == nullptr ? "" : name, kLongestName));
    return {};
  });
  Guard(subject.c_str(), [&]() -> Status {
    if (fields == nullptr) {
      return InvalidArgument("the fields must not be null");
    }
    switch (phase) {
      case TensorRTPhase::kBUILD:
        return Plugin::FromAttributes(op_, subject, *fields, &plugin);
      case TensorRTPhase::kRUNTIME:
        return Plugin::FromEngine(op_, subject, *fields, &plugin);
    }
    return InvalidArgument("unknown phase ", static_cast<std::int32_t>(phase));
  });
  return plugin.release();
}

}  // namespace dynamo_moe::plugin
