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

Shape to_vector(const nvinfer1::Dims& dims) { return {dims.d, dims.d + std::max(dims.nbDims, 0)}; }

nvinfer1::Dims to_dims(const std::string& name, const Shape& shape) {
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

// TensorRT has it from 10.16 on: the second of these is for older headers.
template <typename Context>
auto set_communicator(Context& context, void* communicator, int)
    -> decltype(context.setCommunicator(communicator)) {
  return context.setCommunicator(communicator);
}

template <typename Context>
bool set_communicator(Context&, void*, long) {
  throw std::runtime_error("an engine of several ranks needs TensorRT 10.16 or later");
}

// Headers from before TensorRT updated caches in place lack it: the second of these is for them.
template <typename CudaEngine>
auto aliased_input(const CudaEngine& engine, const char* output, int)
    -> decltype(engine.getAliasedInputTensor(output)) {
  return engine.getAliasedInputTensor(output);
}

template <typename CudaEngine>
const char* aliased_input(const CudaEngine& /*engine*/, const char* /*output*/, long) {
  return nullptr;
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

std::string to_text(const Shape& shape) {
  std::string text = "[";
  for (const std::int64_t size : shape) {
    text += (text.size() > 1 ? ", " : "") + std::to_string(size);
  }
  return text + ']';
}

std::size_t Tensor::elements() const {
  std::size_t count = 1;
  for (const std::int64_t size : shape) {
    count *= static_cast<std::size_t>(size);
  }
  return count;
}

Engine::Engine(const Options& options) : runtime_(nvinfer1::createInferRuntime(logger_)) {
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
  context_.reset(engine_->createExecutionContext());
  if (!context_) {
    fail("TensorRT makes no execution context");
  }
  if (options.place) {
    communicator_ =
        std::make_unique<Communicator>(*options.place, options.nccl_id, options.nccl_wait);
    if (!set_communicator(*context_, communicator_->get(), 0)) {
      fail("TensorRT does not take the communicator");
    }
  }
  for (std::int32_t at = 0; at < engine_->getNbIOTensors(); ++at) {
    const char* name = engine_->getIOTensorName(at);
    tensors_.push_back({name, engine_->getTensorIOMode(name) == nvinfer1::TensorIOMode::kINPUT,
                        format_of(name, engine_->getTensorDataType(name)),
                        to_vector(engine_->getTensorShape(name))});
  }
}

Shape Engine::profile_shape(const std::string& input, std::int32_t profile,
                            nvinfer1::OptProfileSelector which) const {
  return to_vector(engine_->getProfileShape(input.c_str(), profile, which));
}

void Engine::select_profile(std::int32_t profile, cudaStream_t stream) {
  if (!context_->setOptimizationProfileAsync(profile, stream)) {
    fail("TensorRT does not take profile " + std::to_string(profile));
  }
}

void Engine::set_shape(const std::string& input, const Shape& shape) {
  if (!context_->setInputShape(input.c_str(), to_dims(input, shape))) {
    fail("the engine does not take the shape " + to_text(shape) + " of input " + input);
  }
}

Shape Engine::shape(const std::string& tensor) const {
  Shape shape = to_vector(context_->getTensorShape(tensor.c_str()));
  if (std::any_of(shape.begin(), shape.end(), [](auto size) { return size < 0; })) {
    throw std::runtime_error("the shape of output " + tensor +
                             " depends on values, which is not handled here");
  }
  return shape;
}

std::string Engine::updated_input(const std::string& output) const {
  const char* input = aliased_input(*engine_, output.c_str(), 0);
  return input == nullptr ? "" : input;
}

void Engine::set_address(const std::string& tensor, void* address) {
  if (!context_->setTensorAddress(tensor.c_str(), address)) {
    fail("TensorRT does not take the address of " + tensor);
  }
}

void Engine::enqueue(cudaStream_t stream) {
  if (!context_->enqueueV3(stream)) {
    fail("TensorRT does not run the engine");
  }
}

void Engine::fail(const std::string& what) {
  throw std::runtime_error(what + ": " + logger_.take_errors());
}

}  // namespace run_engine
