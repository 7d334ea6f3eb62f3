// An engine with one execution context, and its tensors in device memory.
#pragma once

#include <NvInferRuntime.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cuda.h"
#include "options.h"
#include "results.h"

namespace run_engine {

// Prints errors and warnings to stderr, and keeps the errors for a message.
class Logger : public nvinfer1::ILogger {
 public:
  void log(Severity severity, const char* message) noexcept override;

  // The errors since the last call.
  std::string take_errors();

 private:
  // TensorRT may log from several threads.
  std::mutex mutex_;
  std::string errors_;
};

struct Tensor {
  std::string name;
  bool is_input;
  Format format;
  std::vector<std::int64_t> shape;
  DeviceMemory memory;

  [[nodiscard]] std::size_t elements() const;
  [[nodiscard]] std::size_t bytes() const { return elements() * bytes_of(format); }
};

class Engine {
 public:
  // Loads the plugin's library and the engine, sets shapes and allocates tensors.
  Engine(const Options& options, cudaStream_t stream);

  std::vector<Tensor>& tensors() { return tensors_; }

  void enqueue(cudaStream_t stream);

 private:
  [[nodiscard]] std::vector<std::int64_t> input_shape(const Options& options,
                                                      const char* name) const;
  [[noreturn]] void fail(const std::string& what);

  Logger logger_;
  // In this order: a context is destroyed before its engine, and that before its runtime.
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  std::vector<Tensor> tensors_;
};

}  // namespace run_engine
