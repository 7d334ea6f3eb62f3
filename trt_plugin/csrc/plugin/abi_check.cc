// Compares our declaration of TensorRT's interface with the SDK's headers, if they are installed.
// It names each difference, and fails if there is one.
//
// A virtual function's place in its table is what a pointer to the member holds under the Itanium
// C++ ABI, which every compiler on Linux follows.
#ifdef DYNAMO_MOE_TENSORRT_SDK

#include <NvInferRuntime.h>

// Our declaration beside the SDK's.
#undef DYNAMO_MOE_TENSORRT_SDK
#define DYNAMO_MOE_TENSORRT_NAMESPACE declared
#include <cstddef>
#include <cstdio>
#include <cstring>

#include "plugin/registry_abi.h"
#include "plugin/tensorrt_abi.h"

namespace {

int checks = 0;
int differences = 0;

void Same(const char* what, long long ours, long long theirs) {
  ++checks;
  if (ours != theirs) {
    ++differences;
    std::printf("%s: declared %lld, the SDK has %lld\n", what, ours, theirs);
  }
}

// The place in the table of virtual functions.
template <typename Member>
long long SlotOf(Member member) {
  static_assert(sizeof(member) == 2 * sizeof(std::ptrdiff_t));
  std::ptrdiff_t words[2];
  std::memcpy(words, &member, sizeof(words));
  const bool is_virtual = (words[0] & 1) != 0;
  return is_virtual ? (words[0] - 1) / static_cast<std::ptrdiff_t>(sizeof(void*)) : -1;
}

#define SAME_SIZE(type)                                                   \
  Same("size of " #type, sizeof(declared::type), sizeof(nvinfer1::type)); \
  Same("alignment of " #type, alignof(declared::type), alignof(nvinfer1::type))
#define SAME_OFFSET(type, field)                                       \
  Same("offset of " #type "." #field, offsetof(declared::type, field), \
       offsetof(nvinfer1::type, field));                               \
  Same("size of " #type "." #field, sizeof(declared::type::field), sizeof(nvinfer1::type::field))
#define SAME_VALUE(type, name)                                         \
  Same(#type "::" #name, static_cast<long long>(declared::type::name), \
       static_cast<long long>(nvinfer1::type::name))
#define SAME_SLOT(type, function)                                          \
  Same("slot of " #type "::" #function, SlotOf(&declared::type::function), \
       SlotOf(&nvinfer1::type::function))
// A slot of a class that the SDK has under another name.
#define SAME_SLOT_AS(ours, function, theirs) \
  Same("slot of " #theirs "::" #function, SlotOf(&ours::function), SlotOf(&theirs::function))

void CheckRecords() {
  SAME_SIZE(Dims64);
  SAME_OFFSET(Dims64, nbDims);
  SAME_OFFSET(Dims64, d);
  Same("Dims64::MAX_DIMS", declared::Dims64::MAX_DIMS, nvinfer1::Dims64::MAX_DIMS);
  Same("size of Dims", sizeof(declared::Dims), sizeof(nvinfer1::Dims));
  SAME_SIZE(PluginTensorDesc);
  SAME_OFFSET(PluginTensorDesc, dims);
  SAME_OFFSET(PluginTensorDesc, type);
  SAME_OFFSET(PluginTensorDesc, format);
  SAME_OFFSET(PluginTensorDesc, scale);
  SAME_SIZE(DynamicPluginTensorDesc);
  SAME_OFFSET(DynamicPluginTensorDesc, desc);
  SAME_OFFSET(DynamicPluginTensorDesc, min);
  SAME_OFFSET(DynamicPluginTensorDesc, max);
  SAME_OFFSET(DynamicPluginTensorDesc, opt);
  SAME_SIZE(DimsExprs);
  SAME_OFFSET(DimsExprs, nbDims);
  SAME_OFFSET(DimsExprs, d);
  SAME_SIZE(PluginField);
  SAME_OFFSET(PluginField, name);
  SAME_OFFSET(PluginField, data);
  SAME_OFFSET(PluginField, type);
  SAME_OFFSET(PluginField, length);
  SAME_SIZE(PluginFieldCollection);
  SAME_OFFSET(PluginFieldCollection, nbFields);
  SAME_OFFSET(PluginFieldCollection, fields);
  SAME_SIZE(InterfaceInfo);
  SAME_OFFSET(InterfaceInfo, kind);
  SAME_OFFSET(InterfaceInfo, major);
  SAME_OFFSET(InterfaceInfo, minor);
}

void CheckValues() {
  SAME_SIZE(DataType);
  SAME_VALUE(DataType, kFLOAT);
  SAME_VALUE(DataType, kHALF);
  SAME_VALUE(DataType, kINT8);
  SAME_VALUE(DataType, kINT32);
  SAME_VALUE(DataType, kBOOL);
  SAME_VALUE(DataType, kUINT8);
  SAME_VALUE(DataType, kFP8);
  SAME_VALUE(DataType, kBF16);
  SAME_VALUE(DataType, kINT64);
  SAME_SIZE(TensorFormat);
  SAME_VALUE(TensorFormat, kLINEAR);
  SAME_SIZE(APILanguage);
  SAME_VALUE(APILanguage, kCPP);
  SAME_VALUE(APILanguage, kPYTHON);
  SAME_SIZE(TensorRTPhase);
  SAME_VALUE(TensorRTPhase, kBUILD);
  SAME_VALUE(TensorRTPhase, kRUNTIME);
  SAME_SIZE(PluginCapabilityType);
  SAME_VALUE(PluginCapabilityType, kCORE);
  SAME_VALUE(PluginCapabilityType, kBUILD);
  SAME_VALUE(PluginCapabilityType, kRUNTIME);
  SAME_SIZE(PluginFieldType);
  SAME_VALUE(PluginFieldType, kFLOAT16);
  SAME_VALUE(PluginFieldType, kFLOAT32);
  SAME_VALUE(PluginFieldType, kFLOAT64);
  SAME_VALUE(PluginFieldType, kINT8);
  SAME_VALUE(PluginFieldType, kINT16);
  SAME_VALUE(PluginFieldType, kINT32);
  SAME_VALUE(PluginFieldType, kCHAR);
  SAME_VALUE(PluginFieldType, kDIMS);
  SAME_VALUE(PluginFieldType, kUNKNOWN);
  SAME_VALUE(PluginFieldType, kBF16);
  SAME_VALUE(PluginFieldType, kINT64);
}

void CheckInterfaces() {
  SAME_SIZE(IVersionedInterface);
  SAME_SLOT(IVersionedInterface, getAPILanguage);
  SAME_SLOT(IVersionedInterface, getInterfaceInfo);
  SAME_SIZE(IPluginCapability);
  SAME_SIZE(IPluginCreatorInterface);
  SAME_SIZE(IPluginV3);
  SAME_SLOT(IPluginV3, getInterfaceInfo);
  SAME_SLOT(IPluginV3, getCapabilityInterface);
  SAME_SLOT(IPluginV3, clone);
  SAME_SIZE(IPluginV3OneCore);
  SAME_SLOT(IPluginV3OneCore, getPluginName);
  SAME_SLOT(IPluginV3OneCore, getPluginVersion);
  SAME_SLOT(IPluginV3OneCore, getPluginNamespace);
  SAME_SIZE(IPluginV3OneBuild);
  SAME_SLOT(IPluginV3OneBuild, configurePlugin);
  SAME_SLOT(IPluginV3OneBuild, getOutputDataTypes);
  SAME_SLOT(IPluginV3OneBuild, getOutputShapes);
  SAME_SLOT(IPluginV3OneBuild, supportsFormatCombination);
  SAME_SLOT(IPluginV3OneBuild, getNbOutputs);
  SAME_SLOT(IPluginV3OneBuild, getWorkspaceSize);
  SAME_SLOT(IPluginV3OneBuild, getValidTactics);
  SAME_SLOT(IPluginV3OneBuild, getNbTactics);
  SAME_SLOT(IPluginV3OneBuild, getTimingCacheID);
  SAME_SLOT(IPluginV3OneBuild, getFormatCombinationLimit);
  SAME_SLOT(IPluginV3OneBuild, getMetadataString);
  SAME_SIZE(IPluginV3OneRuntime);
  SAME_SLOT(IPluginV3OneRuntime, setTactic);
  SAME_SLOT(IPluginV3OneRuntime, onShapeChange);
  SAME_SLOT(IPluginV3OneRuntime, enqueue);
  SAME_SLOT(IPluginV3OneRuntime, attachToContext);
  SAME_SLOT(IPluginV3OneRuntime, getFieldsToSerialize);
  SAME_SIZE(IPluginCreatorV3One);
  SAME_SLOT(IPluginCreatorV3One, createPlugin);
  SAME_SLOT(IPluginCreatorV3One, getFieldNames);
  SAME_SLOT(IPluginCreatorV3One, getPluginName);
  SAME_SLOT(IPluginCreatorV3One, getPluginVersion);
  SAME_SLOT(IPluginCreatorV3One, getPluginNamespace);
}

void CheckRegistry() {
  Same("slot of IPluginRegistry::loadLibrary",
       dynamo_moe::plugin::LoadLibrarySlot(NV_TENSORRT_MAJOR),
       SlotOf(&nvinfer1::IPluginRegistry::loadLibrary));
}

void CheckLoggers() {
#if NV_TENSORRT_MAJOR == 10
  namespace loggers = dynamo_moe::tensorrt::v10;
#else
  namespace loggers = dynamo_moe::tensorrt::v11;
  SAME_SLOT_AS(loggers::Logger, getInterfaceInfo, nvinfer1::ILogger);
  SAME_SLOT_AS(loggers::LoggerFinder, getInterfaceInfo, nvinfer1::ILoggerFinder);
#endif
  SAME_SLOT_AS(loggers::Logger, log, nvinfer1::ILogger);
  SAME_SLOT_AS(loggers::LoggerFinder, findLogger, nvinfer1::ILoggerFinder);
  using Theirs = nvinfer1::ILogger::Severity;
  using Ours = dynamo_moe::tensorrt::Severity;
  Same("ILogger::Severity::kERROR", static_cast<int>(Ours::kError),
       static_cast<int>(Theirs::kERROR));
  Same("ILogger::Severity::kWARNING", static_cast<int>(Ours::kWarning),
       static_cast<int>(Theirs::kWARNING));
}

}  // namespace

int main() {
  CheckRecords();
  CheckValues();
  CheckInterfaces();
  CheckRegistry();
  CheckLoggers();
  std::printf("TensorRT %d.%d: %d of %d checks differ\n", NV_TENSORRT_MAJOR, NV_TENSORRT_MINOR,
              differences, checks);
  return differences == 0 ? 0 : 1;
}

#endif  // DYNAMO_MOE_TENSORRT_SDK
