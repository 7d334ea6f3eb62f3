// As much of TensorRT's runtime as examples/run_engine calls, where its headers are not at hand.
// tensorrt_runtime.cc beside it computes with ONNX Runtime what a GPU would.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace nvinfer1 {

enum class DataType : std::int32_t {
  kFLOAT = 0,
  kHALF = 1,
  kINT8 = 2,
  kINT32 = 3,
  kBOOL = 4,
  kUINT8 = 5,
  kFP8 = 6,
  kBF16 = 7,
  kINT64 = 8
};

enum class TensorIOMode : std::int32_t { kNONE = 0, kINPUT = 1, kOUTPUT = 2 };

enum class OptProfileSelector : std::int32_t { kMIN = 0, kOPT = 1, kMAX = 2 };

struct Dims {
  static constexpr std::int32_t MAX_DIMS = 8;
  std::int32_t nbDims;
  std::int64_t d[MAX_DIMS];
};

class ILogger {
 public:
  enum class Severity : std::int32_t { kINTERNAL_ERROR, kERROR, kWARNING, kINFO, kVERBOSE };
  virtual ~ILogger() = default;
  virtual void log(Severity severity, const char* message) noexcept = 0;
};

class IPluginRegistry {
 public:
  void* loadLibrary(const char* path) noexcept;
};

// What an engine's file says of a tensor.
struct TensorRecord {
  std::string name;
  bool is_input;
  DataType type;
  Dims shape;
  // Of an output, the input that it updates in place; empty: none.
  std::string updates;
  // Of an input: the smallest, usual and largest shape of each profile.
  std::vector<Dims> profiles;
};

class ICudaEngine;

class IExecutionContext {
 public:
  explicit IExecutionContext(const ICudaEngine& engine) : engine_(engine) {}
  bool setOptimizationProfileAsync(std::int32_t profile, cudaStream_t stream) noexcept;
  bool setInputShape(const char* name, const Dims& shape) noexcept;
  Dims getTensorShape(const char* name) const noexcept;
  bool setTensorAddress(const char* name, void* address) noexcept;
  bool enqueueV3(cudaStream_t stream) noexcept;
  bool setCommunicator(void* communicator) noexcept;

 private:
  bool compute(bool into_outputs) const;

  const ICudaEngine& engine_;
  std::int32_t profile_ = 0;
  std::map<std::string, Dims> inputs_;
  mutable std::map<std::string, Dims> outputs_;
  std::map<std::string, void*> addresses_;
};

class ICudaEngine {
 public:
  std::int32_t getNbIOTensors() const noexcept { return std::int32_t(records_.size()); }
  const char* getIOTensorName(std::int32_t at) const noexcept {
    return records_[std::size_t(at)].name.c_str();
  }
  TensorIOMode getTensorIOMode(const char* name) const noexcept;
  DataType getTensorDataType(const char* name) const noexcept { return find(name).type; }
  Dims getTensorShape(const char* name) const noexcept { return find(name).shape; }
  Dims getProfileShape(const char* name, std::int32_t profile,
                       OptProfileSelector which) const noexcept;
  std::int32_t getNbOptimizationProfiles() const noexcept { return profiles_; }
  const char* getAliasedInputTensor(const char* name) const noexcept {
    const std::string& input = find(name).updates;
    return input.empty() ? nullptr : input.c_str();
  }
  IExecutionContext* createExecutionContext() noexcept { return new IExecutionContext(*this); }

 private:
  friend class IRuntime;
  friend class IExecutionContext;
  const TensorRecord& find(const std::string& name) const;

  ILogger* logger_;
  std::int32_t profiles_;
  std::vector<TensorRecord> records_;
};

class IRuntime {
 public:
  explicit IRuntime(ILogger& logger) : logger_(&logger) {}
  IPluginRegistry& getPluginRegistry() noexcept { return registry_; }
  ICudaEngine* deserializeCudaEngine(const void* plan, std::size_t size) noexcept;

 private:
  ILogger* logger_;
  IPluginRegistry registry_;
};

inline IRuntime* createInferRuntime(ILogger& logger) noexcept { return new IRuntime(logger); }

}  // namespace nvinfer1
