// What TensorRT calls when it loads this library.
#include <cstdint>

#include "dynamo_moe.h"
#include "plugin_creator.h"
#include "plugin_log.h"

extern "C" DYNAMO_MOE_API void setLoggerFinder(void* finder) {
  dynamo_moe::plugin::SetLoggerFinder(finder);
}

extern "C" DYNAMO_MOE_API nvinfer1::IPluginCreatorInterface* const* getCreators(
    std::int32_t& count) {
  static dynamo_moe::plugin::Creator dropless(dynamo_moe::format::kDropless);
  static dynamo_moe::plugin::Creator experts(dynamo_moe::format::kExpertsOnly);
  static nvinfer1::IPluginCreatorInterface* const creators[] = {&dropless, &experts};
  count = 2;
  return creators;
}
