// The operators of MoE layers on the CUDA provider: the kernels of a bundle, as in TensorRT's
// plugin.
//
// A call enqueues on the provider's stream and waits for nothing, so it can be captured. The
// workspace is scratch memory of the session's, which is ordered by that stream: where other
// streams run the same session, it does not pass to them before the run has ended.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "kernels/kernels.h"
#include "kernels/layer_bundle.h"
#include "node/inputs.h"
#include "onnxruntime/node_info.h"
#include "onnxruntime/ort_abi.h"
#include "onnxruntime/runtime.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

// The session's entry that names a bundle.
inline constexpr const char* kKernelsEntry = "dynamo_moe.kernels";

// Which operator a node has, and the bundle's path that the session's entry gives.
struct CudaNode {
  Node node;
  bool offloaded;
  std::string kernels;
};

class CudaKernel {
 public:
  // Checks a node's attributes, dtypes and constants, finds its kernels, and loads them where the
  // thread has a context.
  static Status Create(const Api& api, const CudaNode& node, const OrtKernelInfo* info,
                       std::unique_ptr<CudaKernel>* kernel);

  // Checks the other inputs and enqueues. Any number of threads may do so.
  Status Compute(OrtKernelContext* context);

  const Api& api() const { return api_; }

 private:
  struct Inputs;

  explicit CudaKernel(const Api& api) : api_(api) {}

  // Takes a node's layer, with the inputs that the node has, from the bundle.
  Status TakeKernels(const CudaNode& node, const OrtKernelInfo* info);
  Status DescribeNode(const OrtKernelInfo* info, Inputs* inputs);
  Status Gather(const OrtKernelContext* context, Inputs* inputs) const;
  // The cache of an offloaded layer's experts for calls on a stream, else null.
  Status CacheFor(void* stream, std::shared_ptr<Cache>* cache);
  Status OpenCache(std::shared_ptr<Cache>* cache) const;
  void Log(LogLevel level, const std::string& text) const;

  Api api_;
  Node node_ = {};
  std::string name_;
  const OrtLogger* logger_ = nullptr;  // The session's.
  Owned<Allocator> allocator_{nullptr, {nullptr}};
  // The file stays in memory for the session's next layers, until this one is first called.
  std::shared_ptr<const LayerBundle> bundle_;
  std::atomic<bool> called_ = false;
  std::shared_ptr<const Kernels> kernels_;
  std::int32_t inputs_ = 0;
  // Of inputs that are the same in each call: they are checked once.
  std::array<bool, kMaxInputs> is_constant_ = {};
  std::array<TensorType, kMaxInputs> constants_;

  Offload offload_;
  std::mutex mutex_;
  // One for each stream, whose calls are in order, or else one for all, under null.
  std::map<void*, std::shared_ptr<Cache>> caches_;
  // Opened with the kernel, for the first stream.
  std::shared_ptr<Cache> first_cache_;
};

}  // namespace dynamo_moe::onnxruntime
