// An engine with one execution context.
#pragma once

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "options.h"
#include "ranks.h"
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

using Shape = std::vector<std::int64_t>;

// Such as "[2, 16]".
std::string to_text(const Shape& shape);

// An input or output. Sizes that are not fixed are -1, until a call gives them.
struct Tensor {
  std::string name;
  bool is_input;
  Format format;
  Shape shape;

  [[nodiscard]] std::size_t elements() const;
  [[nodiscard]] std::size_t bytes() const { return elements() * bytes_of(format); }
};

class Engine {
 public:
  // Loads the plugin's library, if there is one, and the engine. That of a rank of several waits
  // for the others.
  explicit Engine(const Options& options);

  [[nodiscard]] const std::vector<Tensor>& tensors() const { return tensors_; }
  [[nodiscard]] std::int32_t profiles() const { return engine_->getNbOptimizationProfiles(); }
  [[nodiscard]] Shape profile_shape(const std::string& input, std::int32_t profile,
                                    nvinfer1::OptProfileSelector which) const;

  // All shapes are set anew after that.
  void select_profile(std::int32_t profile, cudaStream_t stream);
  void set_shape(const std::string& input, const Shape& shape);
  // The input that an output updates in place, such as a cache of a fixed length; empty: none.
  [[nodiscard]] std::string updated_input(const std::string& output) const;
  // Of any tensor, once all inputs have theirs.
  [[nodiscard]] Shape shape(const std::string& tensor) const;
  void set_address(const std::string& tensor, void* address);
  void enqueue(cudaStream_t stream);

 private:
  [[noreturn]] void fail(const std::string& what);

  Logger logger_;
  // In this order: a context is destroyed before its engine, and that before its runtime; the
  // communicator outlives all of them.
  std::unique_ptr<Communicator> communicator_;
  std::unique_ptr<nvinfer1::IRuntime> runtime_;
  std::unique_ptr<nvinfer1::ICudaEngine> engine_;
  std::unique_ptr<nvinfer1::IExecutionContext> context_;
  std::vector<Tensor> tensors_;
};

}  // namespace run_engine
