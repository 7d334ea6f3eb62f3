#include "engine.h"

#include <algorithm>
#include <fstream>
#include <iostream>
#include <iterator>
#include <stdexcept>

namespace run_engine {
namespace {

Format format_of(const std::string& name, nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kFLOAT:
      return Format::kFloat32;
    case nvinfer1::DataType::kHALF:
      return Format::kFloat16;
    case nvinfer1::DataType::kBF16:
      return Format::kBfloat16;
    case nvinfer1::DataType::kINT64:
      return Format::kInt64;
    case nvinfer1::DataType::kINT32:
      return Format::kInt32;
    case nvinfer1::DataType::kINT8:
      return Format::kInt8;
    case nvinfer1::DataType::kUINT8:
      return Format::kUint8;
    case nvinfer1::DataType::kBOOL:
      return Format::kBool;
    default:
      throw std::runtime_error("tensor " + name + " has a dtype that is not handled here: " +
                               std::to_string(static_cast<int>(type)));
  }
}

std::vector<std::int64_t> to_vector(const nvinfer1::Dims& dims) {
  return {dims.d, dims.d + std::max(dims.nbDims, 0)};
}

nvinfer1::Dims to_dims(const std::string& name, const std::vector<std::int64_t>& shape) {
  if (shape.size() > nvinfer1::Dims::MAX_DIMS) {
    throw UsageError("input " + name + " has too many dimensions: " + std::to_string(shape.size()));
  }
  nvinfer1::Dims dims{};
  dims.nbDims = static_cast<std::int32_t>(shape.size());
  std::copy(shape.begin(), shape.end(), dims.d);
  return dims;
}

std::vector<char> read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::vector<char> content((std::istreambuf_iterator<char>(file)), {});
  if (!file.good() && !file.eof()) {
    throw std::runtime_error("cannot read " + path);
  }
  return content;
}

}  // namespace

void Logger::log(Severity severity, const char* message) noexcept {
  if (severity > Severity::kWARNING) {
    return;
  }
  try {
    const std::scoped_lock lock(mutex_);
    std::cerr << "TensorRT: " << message << '\n';
    if (severity <= Severity::kERROR) {
      errors_ += errors_.empty() ? "" : "; ";
      errors_ += message;
    }
  } catch (...) {
    // No exception may pass through TensorRT; a line of its log is lost.
    return;
  }
}

std::string Logger::take_errors() {
  std::string errors;
  {
    const std::scoped_lock lock(mutex_);
    errors.swap(errors_);
  }
  return errors.empty() ? "TensorRT's log says no more" : errors;
}

std::size_t Tensor::elements() const {
  std::size_t count = 1;
  for (const std::int64_t size : shape) {
    count *= static_cast<std::size_t>(size);
  }
  return count;
}

Engine::Engine(const Options& options, cudaStream_t stream)
    : runtime_(nvinfer1::createInferRuntime(logger_)) {
  if (!runtime_) {
    fail("TensorRT has no runtime here");
  }
  // Engines look for plugins in the runtime's registry, whose parent is the process's.
  if (!options.plugin.empty() &&
      runtime_->getPluginRegistry().loadLibrary(options.plugin.c_str()) == nullptr) {
    fail("TensorRT does not load " + options.plugin);
  }
  const std::vector<char> plan = read(options.engine);
  engine_.reset(runtime_->deserializeCudaEngine(plan.data(), plan.size()));
  if (!engine_) {
    fail("TensorRT does not load " + options.engine +
         (options.plugin.empty() ? " (MoE layers need --plugin libdynamo_moe.so)" : ""));
  }
  if (options.profile >= engine_->getNbOptimizationProfiles()) {
    throw UsageError("the engine has " + std::to_string(engine_->getNbOptimizationProfiles()) +
                     " profiles, got --profile " + std::to_string(options.profile));
  }
  context_.reset(engine_->createExecutionContext());
  if (!context_ || !context_->setOptimizationProfileAsync(options.profile, stream)) {
    fail("TensorRT makes no execution context");
  }
  std::vector<std::string> inputs;
  std::vector<std::string> outputs;
  for (std::int32_t at = 0; at < engine_->getNbIOTensors(); ++at) {
    const char* name = engine_->getIOTensorName(at);
    const bool is_input = engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT;
    (is_input ? inputs : outputs).emplace_back(name);
    if (is_input && !context_->setInputShape(name, to_dims(name, input_shape(options, name)))) {
      fail(std::string("the engine does not take this shape of input ") + name);
    }
  }
  const auto check_names = [](const auto& given, const std::vector<std::string>& known,
                              const char* kind) {
    for (const auto& [name, value] : given) {
      if (std::find(known.begin(), known.end(), name) == known.end()) {
        throw UsageError("the engine has no " + std::string(kind) + ' ' + name);
      }
    }
  };
  check_names(options.shapes, inputs, "input");
  check_names(options.input_files, inputs, "input");
  check_names(options.output_files, outputs, "output");
  for (std::int32_t at = 0; at < engine_->getNbIOTensors(); ++at) {
    const char* name = engine_->getIOTensorName(at);
    Tensor tensor{name, engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT,
                  format_of(name, engine_->getTensorDataType(name)),
                  to_vector(context_->getTensorShape(name)), DeviceMemory()};
    if (std::any_of(tensor.shape.begin(), tensor.shape.end(), [](auto size) { return size < 0; })) {
      throw std::runtime_error("the shape of output " + tensor.name +
                               " depends on values, which is not handled here");
    }
    tensor.memory = allocate(tensor.bytes());
    if (!context_->setTensorAddress(name, tensor.memory.get())) {
      fail("TensorRT does not take the address of " + tensor.name);
    }
    tensors_.push_back(std::move(tensor));
  }
}

void Engine::enqueue(cudaStream_t stream) {
  if (!context_->enqueueV3(stream)) {
    fail("TensorRT does not run the engine");
  }
}

std::vector<std::int64_t> Engine::input_shape(const Options& options, const char* name) const {
  const auto given = options.shapes.find(name);
  if (given != options.shapes.end()) {
    return given->second;
  }
  std::vector<std::int64_t> shape = to_vector(
      engine_->getProfileShape(name, options.profile, nvinfer1::OptProfileSelector::kOPT));
  if (options.batch && !shape.empty() && engine_->getTensorShape(name).d[0] < 0) {
    shape[0] = *options.batch;
  }
  return shape;
}

void Engine::fail(const std::string& what) {
  throw std::runtime_error(what + ": " + logger_.take_errors());
}

}  // namespace run_engine
