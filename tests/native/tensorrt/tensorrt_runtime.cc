// Stands in for TensorRT's and CUDA's runtimes, so that examples/run_engine runs without a GPU.
//
// Device memory is the host's. What an engine computes is asked of a callback, which Python sets.
// Whatever TensorRT would refuse, or a GPU would do wrong, is an error: shapes outside of the
// profile, missing addresses, tensors beyond their memory, outputs upon inputs. New memory is full
// of NaN.
//
// An engine's file is text. First the number of profiles, then for each tensor its name, 1 for an
// input, DataType and shape, then, of an input, the smallest, usual and largest shape of each
// profile, and of an output the input that it updates in place, or "-". A shape is its rank and its
// sizes.

#include <NvInferRuntime.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <sstream>

namespace {

// Of each allocation, its size.
std::map<std::byte*, std::size_t> allocations;
// Calls between the begin and the end of a capture.
bool captures = false;
std::vector<std::function<bool()>> captured;

std::size_t bytes_of(nvinfer1::DataType type) {
  switch (type) {
    case nvinfer1::DataType::kINT64:
      return 8;
    case nvinfer1::DataType::kFLOAT:
    case nvinfer1::DataType::kINT32:
      return 4;
    case nvinfer1::DataType::kHALF:
    case nvinfer1::DataType::kBF16:
      return 2;
    default:
      return 1;
  }
}

std::size_t bytes_of(nvinfer1::DataType type, const nvinfer1::Dims& shape) {
  std::size_t bytes = bytes_of(type);
  for (std::int32_t axis = 0; axis < shape.nbDims; ++axis) {
    bytes *= std::size_t(shape.d[axis]);
  }
  return bytes;
}

bool holds(const void* address, std::size_t bytes) {
  const auto* begin = static_cast<const std::byte*>(address);
  return std::any_of(allocations.begin(), allocations.end(), [&](const auto& each) {
    return each.first <= begin && begin + bytes <= each.first + each.second;
  });
}

bool overlap(const void* a, std::size_t a_bytes, const void* b, std::size_t b_bytes) {
  const auto* first = static_cast<const std::byte*>(a);
  const auto* second = static_cast<const std::byte*>(b);
  return first < second + b_bytes && second < first + a_bytes;
}

nvinfer1::Dims read_shape(std::istream& text) {
  nvinfer1::Dims shape{};
  text >> shape.nbDims;
  std::for_each(shape.d, shape.d + shape.nbDims, [&](std::int64_t& size) { text >> size; });
  return shape;
}

}  // namespace

extern "C" {

struct StandinTensor {
  const char* name;
  std::int32_t is_input;
  nvinfer1::DataType type;
  nvinfer1::Dims shape;
  // Null: only the outputs' shapes are asked for.
  void* address;
};

// Sets the outputs' shapes, and their values where there are addresses. Returns 0, or another
// number after an error.
using StandinCompute = int (*)(std::int32_t count, StandinTensor* tensors);

StandinCompute standin_compute = nullptr;
// What a test asks afterwards: bytes that were copied to the host, and profiles that were selected.
std::int64_t standin_bytes_to_host = 0;
std::int32_t standin_profile_changes = 0;
// The GPU that was selected, and the communicator's ranks and rank, which nccl_standin.cc writes.
std::int32_t standin_device = 0;
std::int32_t standin_ranks = 0;
std::int32_t standin_rank = 0;

std::int64_t standin_allocations() { return std::int64_t(allocations.size()); }

}  // extern "C"

namespace nvinfer1 {

void* IPluginRegistry::loadLibrary(const char* path) noexcept {
  return std::strstr(path, "libdynamo_moe") == nullptr ? nullptr : this;
}

const TensorRecord& ICudaEngine::find(const std::string& name) const {
  return *std::find_if(records_.begin(), records_.end(),
                       [&](const TensorRecord& each) { return each.name == name; });
}

TensorIOMode ICudaEngine::getTensorIOMode(const char* name) const noexcept {
  return find(name).is_input ? TensorIOMode::kINPUT : TensorIOMode::kOUTPUT;
}

Dims ICudaEngine::getProfileShape(const char* name, std::int32_t profile,
                                  OptProfileSelector which) const noexcept {
  return find(name).profiles[std::size_t(3 * profile + std::int32_t(which))];
}

ICudaEngine* IRuntime::deserializeCudaEngine(const void* plan, std::size_t size) noexcept {
  std::istringstream text(std::string(static_cast<const char*>(plan), size));
  auto* engine = new ICudaEngine();
  engine->logger_ = logger_;
  text >> engine->profiles_;
  std::int32_t type = 0;
  for (TensorRecord record; text >> record.name >> record.is_input >> type;) {
    record.type = DataType(type);
    record.shape = read_shape(text);
    record.profiles.clear();
    record.updates.clear();
    if (!record.is_input) {
      text >> record.updates;
      record.updates = record.updates == "-" ? "" : record.updates;
    }
    for (std::int32_t at = 0; record.is_input && at < 3 * engine->profiles_; ++at) {
      record.profiles.push_back(read_shape(text));
    }
    engine->records_.push_back(record);
  }
  if (engine->records_.empty()) {
    delete engine;
    logger_->log(ILogger::Severity::kERROR, "the plan holds no engine");
    return nullptr;
  }
  return engine;
}

bool IExecutionContext::setOptimizationProfileAsync(std::int32_t profile, cudaStream_t) noexcept {
  profile_ = profile;
  ++standin_profile_changes;
  inputs_.clear();
  outputs_.clear();
  return true;
}

bool IExecutionContext::setInputShape(const char* name, const Dims& shape) noexcept {
  const Dims smallest = engine_.getProfileShape(name, profile_, OptProfileSelector::kMIN);
  const Dims largest = engine_.getProfileShape(name, profile_, OptProfileSelector::kMAX);
  bool fits = shape.nbDims == smallest.nbDims;
  for (std::int32_t axis = 0; fits && axis < shape.nbDims; ++axis) {
    fits = smallest.d[axis] <= shape.d[axis] && shape.d[axis] <= largest.d[axis];
  }
  if (!fits) {
    engine_.logger_->log(ILogger::Severity::kERROR, "the profile does not have this shape");
    return false;
  }
  inputs_[name] = shape;
  outputs_.clear();
  return true;
}

Dims IExecutionContext::getTensorShape(const char* name) const noexcept {
  const auto input = inputs_.find(name);
  if (input != inputs_.end()) {
    return input->second;
  }
  return !outputs_.empty() || compute(false) ? outputs_.at(name) : Dims{-1, {}};
}

bool IExecutionContext::setTensorAddress(const char* name, void* address) noexcept {
  addresses_[name] = address;
  return address != nullptr;
}

bool IExecutionContext::enqueueV3(cudaStream_t) noexcept {
  if (captures) {
    captured.emplace_back([this] { return compute(true); });
    return true;
  }
  return compute(true);
}

bool IExecutionContext::setCommunicator(void* communicator) noexcept {
  const auto* numbers = static_cast<const std::int32_t*>(communicator);
  standin_ranks = numbers[0];
  standin_rank = numbers[1];
  return true;
}

bool IExecutionContext::compute(bool into_outputs) const {
  const auto refuse = [this](const std::string& reason) {
    engine_.logger_->log(ILogger::Severity::kERROR, reason.c_str());
    return false;
  };
  std::vector<StandinTensor> tensors;
  for (const TensorRecord& record : engine_.records_) {
    StandinTensor tensor{record.name.c_str(), record.is_input, record.type, {}, nullptr};
    if (record.is_input) {
      if (inputs_.count(record.name) == 0) {
        return refuse("no shape of " + record.name);
      }
      tensor.shape = inputs_.at(record.name);
    } else if (into_outputs) {
      tensor.shape = getTensorShape(tensor.name);
    }
    if (into_outputs) {
      const auto address = addresses_.find(record.name);
      if (address == addresses_.end()) {
        return refuse("no address of " + record.name);
      }
      tensor.address = address->second;
      if (!holds(tensor.address, bytes_of(tensor.type, tensor.shape))) {
        return refuse(record.name + " is beyond its memory");
      }
    }
    tensors.push_back(tensor);
  }
  if (into_outputs) {
    for (const StandinTensor& a : tensors) {
      for (const StandinTensor& b : tensors) {
        if (&a == &b || a.is_input) {
          continue;
        }
        if (engine_.find(a.name).updates == b.name) {
          if (a.address != b.address) {
            return refuse(std::string(a.name) + " is not upon " + b.name);
          }
        } else if (overlap(a.address, bytes_of(a.type, a.shape), b.address,
                           bytes_of(b.type, b.shape))) {
          return refuse(std::string(a.name) + " is upon " + b.name);
        }
      }
    }
  }
  if (standin_compute(std::int32_t(tensors.size()), tensors.data()) != 0) {
    return refuse("the model cannot be computed");
  }
  for (const StandinTensor& tensor : tensors) {
    if (!tensor.is_input) {
      outputs_[tensor.name] = tensor.shape;
    }
  }
  return true;
}

}  // namespace nvinfer1

extern "C" {

const char* cudaGetErrorString(cudaError_t) { return "an error of CUDA"; }

cudaError_t cudaGetDeviceCount(int* count) {
  *count = 2;
  return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
  standin_device = device;
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** address, std::size_t bytes) {
  *address = std::malloc(bytes);
  std::memset(*address, 0xFF, bytes);
  allocations[static_cast<std::byte*>(*address)] = bytes;
  return cudaSuccess;
}

cudaError_t cudaFree(void* address) {
  if (allocations.erase(static_cast<std::byte*>(address)) == 0) {
    return cudaErrorInvalidValue;
  }
  std::free(address);
  return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t) {
  const bool to_host = kind == cudaMemcpyDeviceToHost;
  if ((!to_host && kind != cudaMemcpyHostToDevice) || !holds(to_host ? from : to, bytes)) {
    return cudaErrorInvalidValue;
  }
  standin_bytes_to_host += to_host ? std::int64_t(bytes) : 0;
  std::memcpy(to, from, bytes);
  return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void* address, int value, std::size_t bytes, cudaStream_t) {
  if (!holds(address, bytes)) {
    return cudaErrorInvalidValue;
  }
  std::memset(address, value, bytes);
  return cudaSuccess;
}

// Handles: any address that is not null.
cudaError_t cudaStreamCreateWithFlags(cudaStream_t* stream, unsigned int) {
  *stream = reinterpret_cast<cudaStream_t>(&allocations);
  return cudaSuccess;
}
cudaError_t cudaStreamDestroy(cudaStream_t) { return cudaSuccess; }
cudaError_t cudaStreamSynchronize(cudaStream_t) { return cudaSuccess; }

cudaError_t cudaEventCreate(cudaEvent_t* event) {
  *event = reinterpret_cast<cudaEvent_t>(&allocations);
  return cudaSuccess;
}
cudaError_t cudaEventDestroy(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* milliseconds, cudaEvent_t, cudaEvent_t) {
  *milliseconds = 1;
  return cudaSuccess;
}

cudaError_t cudaStreamBeginCapture(cudaStream_t, cudaStreamCaptureMode) {
  captured.clear();
  captures = true;
  return cudaSuccess;
}
cudaError_t cudaStreamEndCapture(cudaStream_t, cudaGraph_t* graph) {
  captures = false;
  *graph = reinterpret_cast<cudaGraph_t>(&captured);
  return cudaSuccess;
}
cudaError_t cudaGraphDestroy(cudaGraph_t) { return cudaSuccess; }
cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t* executable, cudaGraph_t,
                                          unsigned long long) {
  *executable = reinterpret_cast<cudaGraphExec_t>(&captured);
  return cudaSuccess;
}
cudaError_t cudaGraphExecDestroy(cudaGraphExec_t) { return cudaSuccess; }
cudaError_t cudaGraphLaunch(cudaGraphExec_t, cudaStream_t) {
  const bool all =
      std::all_of(captured.begin(), captured.end(), [](const auto& call) { return call(); });
  return all ? cudaSuccess : cudaErrorUnknown;
}

}  // extern "C"
