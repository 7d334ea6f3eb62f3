// CUDA's handles, each freed by its owner, and every status checked.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace run_engine {

inline void check(cudaError_t status, const char* call) {
  if (status != cudaSuccess) {
    throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(status));
  }
}

// Those that follow the last one begin again with the first: a process may see but one of them.
inline void select_device(int number) {
  int devices = 0;
  check(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
  if (devices == 0) {
    throw std::runtime_error("CUDA sees no GPU");
  }
  check(cudaSetDevice(number % devices), "cudaSetDevice");
}

// Owns a handle that `destroy` frees.
template <typename Handle, cudaError_t (*destroy)(Handle)>
class Owned {
 public:
  explicit Owned(Handle handle = {}) : handle_(handle) {}
  ~Owned() {
    if (handle_ != Handle{}) {
      // A destructor cannot report; CUDA repeats asynchronous errors in the next checked call.
      static_cast<void>(destroy(handle_));
    }
  }
  Owned(const Owned&) = delete;
  Owned& operator=(const Owned&) = delete;
  Owned(Owned&& other) noexcept : handle_(std::exchange(other.handle_, Handle{})) {}
  Owned& operator=(Owned&& other) noexcept {
    std::swap(handle_, other.handle_);
    return *this;
  }

  [[nodiscard]] Handle get() const { return handle_; }

 private:
  Handle handle_;
};

using Stream = Owned<cudaStream_t, cudaStreamDestroy>;
using Event = Owned<cudaEvent_t, cudaEventDestroy>;
using Graph = Owned<cudaGraph_t, cudaGraphDestroy>;
using GraphExec = Owned<cudaGraphExec_t, cudaGraphExecDestroy>;
using DeviceMemory = Owned<void*, cudaFree>;

inline Stream make_stream() {
  cudaStream_t stream{};
  check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
  return Stream(stream);
}

inline Event make_event() {
  cudaEvent_t event{};
  check(cudaEventCreate(&event), "cudaEventCreate");
  return Event(event);
}

inline DeviceMemory allocate(std::size_t bytes) {
  void* memory = nullptr;
  // TensorRT wants an address for empty tensors too.
  check(cudaMalloc(&memory, bytes == 0 ? 1 : bytes), "cudaMalloc");
  return DeviceMemory(memory);
}

// Device memory that can grow; what it held is lost then.
class Buffer {
 public:
  void* reserve(std::size_t bytes) {
    if (memory_.get() == nullptr || bytes > size_) {
      memory_ = DeviceMemory();
      memory_ = allocate(bytes);
      size_ = bytes;
    }
    return memory_.get();
  }

  void fill_with_zeros(cudaStream_t stream) {
    check(cudaMemsetAsync(memory_.get(), 0, size_, stream), "cudaMemsetAsync");
  }

  [[nodiscard]] void* get() const { return memory_.get(); }

 private:
  DeviceMemory memory_;
  std::size_t size_ = 0;
};

// Copies and waits. On the engine's stream, because others do not wait for one another.
inline void copy(void* to, const void* from, std::size_t bytes, cudaMemcpyKind kind,
                 cudaStream_t stream) {
  check(cudaMemcpyAsync(to, from, bytes, kind, stream), "cudaMemcpyAsync");
  check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
}

// Captures what `enqueue` puts on the stream.
template <typename Enqueue>
GraphExec capture(cudaStream_t stream, Enqueue enqueue) {
  check(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "cudaStreamBeginCapture");
  cudaGraph_t captured{};
  try {
    enqueue();
  } catch (...) {
    // The capture must end before the stream is used again or destroyed.
    if (cudaStreamEndCapture(stream, &captured) == cudaSuccess) {
      Graph discarded(captured);
    }
    throw;
  }
  check(cudaStreamEndCapture(stream, &captured), "cudaStreamEndCapture");
  const Graph graph(captured);
  cudaGraphExec_t executable{};
  check(cudaGraphInstantiateWithFlags(&executable, graph.get(), 0),
        "cudaGraphInstantiateWithFlags");
  return GraphExec(executable);
}

}  // namespace run_engine
