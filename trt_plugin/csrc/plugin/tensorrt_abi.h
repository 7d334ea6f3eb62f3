// The part of TensorRT's C++ interface that a version 3 plugin implements and calls, as in TensorRT
// 10.0 to 11. No package holds TensorRT's headers, so this is our own declaration of their binary
// interface: names, the order of virtual functions, signatures, values. With
// DYNAMO_MOE_TENSORRT_SDK the SDK's headers take its place; abi_check.cc compares the two.
//
// Without the SDK, this header includes only the standard library.
#pragma once

#include <cstddef>
#include <cstdint>

#ifdef DYNAMO_MOE_TENSORRT_SDK

#include <NvInferRuntime.h>

#else

// TensorRT's own namespaces, so that run-time type information agrees across libraries.
#ifndef DYNAMO_MOE_TENSORRT_NAMESPACE
#define DYNAMO_MOE_TENSORRT_NAMESPACE nvinfer1
#endif

// The CUDA runtime's handle of a stream, which is the driver's.
using cudaStream_t = struct CUstream_st*;

namespace DYNAMO_MOE_TENSORRT_NAMESPACE {

// --- Values ---

enum class DataType : std::int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8,
};

// The one memory layout that we use.
enum class TensorFormat : std::int32_t { kLINEAR = 0 };

enum class APILanguage : std::int32_t { kCPP = 0, kPYTHON = 1 };

enum class TensorRTPhase : std::int32_t { kBUILD = 0, kRUNTIME = 1 };

enum class PluginCapabilityType : std::int32_t { kCORE = 0, kBUILD = 1, kRUNTIME = 2 };

enum class PluginFieldType : std::int32_t {
  kFLOAT16 = 0,
  kFLOAT32 = 1,
  kFLOAT64 = 2,
  kINT8 = 3,
  kINT16 = 4,
  kINT32 = 5,
  kCHAR = 6,
  kDIMS = 7,
  kUNKNOWN = 8,
  kBF16 = 9,
  kINT64 = 10,
};

// --- Records ---

struct Dims64 {
  static constexpr std::int32_t MAX_DIMS = 8;

  std::int32_t nbDims;
  std::int64_t d[MAX_DIMS];
};
using Dims = Dims64;

struct PluginTensorDesc {
  Dims dims;
  DataType type;
  TensorFormat format;
  float scale;
};

struct DynamicPluginTensorDesc {
  PluginTensorDesc desc;
  Dims min;
  Dims max;
  Dims opt;
};

// We pass expressions of sizes on, but make none.
class IDimensionExpr;
class IExprBuilder;

struct DimsExprs {
  std::int32_t nbDims;
  const IDimensionExpr* d[Dims::MAX_DIMS];
};

struct PluginField {
  const char* name = nullptr;
  const void* data = nullptr;
  PluginFieldType type = PluginFieldType::kUNKNOWN;
  std::int32_t length = 0;
};

struct PluginFieldCollection {
  std::int32_t nbFields = 0;
  const PluginField* fields = nullptr;
};

struct InterfaceInfo {
  const char* kind;
  std::int32_t major;
  std::int32_t minor;
};

// --- Interfaces ---

class IVersionedInterface {
 public:
  virtual APILanguage getAPILanguage() const noexcept { return APILanguage::kCPP; }
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() noexcept = default;

 protected:
  IVersionedInterface() = default;
  IVersionedInterface(const IVersionedInterface&) = default;
  IVersionedInterface& operator=(const IVersionedInterface&) & = default;
};

// An execution context's allocator and error recorder, which we do not use.
class IPluginResourceContext;

namespace v_1_0 {

class IPluginCapability : public IVersionedInterface {};

class IPluginCreatorInterface : public IVersionedInterface {};

class IPluginV3 : public IVersionedInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN", 1, 0}; }
  virtual IPluginCapability* getCapabilityInterface(PluginCapabilityType type) noexcept = 0;
  virtual IPluginV3* clone() noexcept = 0;
};

class IPluginV3OneCore : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_CORE", 1, 0}; }
  virtual const char* getPluginName() const noexcept = 0;
  virtual const char* getPluginVersion() const noexcept = 0;
  virtual const char* getPluginNamespace() const noexcept = 0;
};

// Version 2 adds one function at the end, for outputs in an input's memory.
class IPluginV3OneBuild : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override { return {"PLUGIN_V3ONE_BUILD", 1, 0}; }
  virtual std::int32_t configurePlugin(const DynamicPluginTensorDesc* in, std::int32_t nbInputs,
                                       const DynamicPluginTensorDesc* out,
                                       std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t getOutputDataTypes(DataType* outputTypes, std::int32_t nbOutputs,
                                          const DataType* inputTypes,
                                          std::int32_t nbInputs) const noexcept = 0;
  virtual std::int32_t getOutputShapes(const DimsExprs* inputs, std::int32_t nbInputs,
                                       const DimsExprs* shapeInputs, std::int32_t nbShapeInputs,
                                       DimsExprs* outputs, std::int32_t nbOutputs,
                                       IExprBuilder& exprBuilder) noexcept = 0;
  virtual bool supportsFormatCombination(std::int32_t pos, const DynamicPluginTensorDesc* inOut,
                                         std::int32_t nbInputs,
                                         std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t getNbOutputs() const noexcept = 0;
  virtual std::size_t getWorkspaceSize(const DynamicPluginTensorDesc* /*in*/,
                                       std::int32_t /*nbInputs*/,
                                       const DynamicPluginTensorDesc* /*out*/,
                                       std::int32_t /*nbOutputs*/) const noexcept {
    return 0;
  }
  virtual std::int32_t getValidTactics(std::int32_t* /*tactics*/,
                                       std::int32_t /*nbTactics*/) noexcept {
    return 0;
  }
  virtual std::int32_t getNbTactics() noexcept { return 0; }
  virtual const char* getTimingCacheID() noexcept { return nullptr; }
  virtual std::int32_t getFormatCombinationLimit() noexcept { return 100; }
  virtual const char* getMetadataString() noexcept { return nullptr; }
};

class IPluginV3OneRuntime : public IPluginCapability {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN_V3ONE_RUNTIME", 1, 0};
  }
  virtual std::int32_t setTactic(std::int32_t /*tactic*/) noexcept { return 0; }
  virtual std::int32_t onShapeChange(const PluginTensorDesc* in, std::int32_t nbInputs,
                                     const PluginTensorDesc* out,
                                     std::int32_t nbOutputs) noexcept = 0;
  virtual std::int32_t enqueue(const PluginTensorDesc* inputDesc,
                               const PluginTensorDesc* outputDesc, const void* const* inputs,
                               void* const* outputs, void* workspace,
                               cudaStream_t stream) noexcept = 0;
  virtual IPluginV3* attachToContext(IPluginResourceContext* context) noexcept = 0;
  virtual const PluginFieldCollection* getFieldsToSerialize() noexcept = 0;
};

class IPluginCreatorV3One : public IPluginCreatorInterface {
 public:
  InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"PLUGIN CREATOR_V3ONE", 1, 0};
  }
  virtual IPluginV3* createPlugin(const char* name, const PluginFieldCollection* fc,
                                  TensorRTPhase phase) noexcept = 0;
  virtual const PluginFieldCollection* getFieldNames() noexcept = 0;
  virtual const char* getPluginName() const noexcept = 0;
  virtual const char* getPluginVersion() const noexcept = 0;
  virtual const char* getPluginNamespace() const noexcept = 0;
};

}  // namespace v_1_0

using v_1_0::IPluginCapability;
using v_1_0::IPluginCreatorInterface;
using v_1_0::IPluginCreatorV3One;
using v_1_0::IPluginV3;
using v_1_0::IPluginV3OneBuild;
using v_1_0::IPluginV3OneCore;
using v_1_0::IPluginV3OneRuntime;

}  // namespace DYNAMO_MOE_TENSORRT_NAMESPACE

#endif  // DYNAMO_MOE_TENSORRT_SDK

// --- Loggers, which TensorRT 11 laid out anew ---

namespace dynamo_moe::tensorrt {

enum class Severity : std::int32_t {
  kInternalError = 0,
  kError = 1,
  kWarning = 2,
  kInfo = 3,
  kVerbose = 4,
};

namespace v10 {

class Logger {
 public:
  virtual void log(Severity severity, const char* message) noexcept = 0;
  virtual ~Logger() = default;
};

class LoggerFinder {
 public:
  virtual Logger* findLogger() = 0;

 protected:
  virtual ~LoggerFinder() = default;
};

}  // namespace v10

namespace v11 {

struct InterfaceInfo {
  const char* kind;
  std::int32_t major;
  std::int32_t minor;
};

class IVersionedInterface {
 public:
  virtual std::int32_t getAPILanguage() const noexcept = 0;
  virtual InterfaceInfo getInterfaceInfo() const noexcept = 0;
  virtual ~IVersionedInterface() = default;
};

class Logger : public IVersionedInterface {
 public:
  virtual void log(Severity severity, const char* message) noexcept = 0;
};

class LoggerFinder : public IVersionedInterface {
 public:
  virtual Logger* findLogger() = 0;
};

}  // namespace v11

}  // namespace dynamo_moe::tensorrt
