#include "onnxruntime/cuda_kernel.h"

#include <cstddef>
#include <utility>

#include "node/attributes.h"

namespace dynamo_moe::onnxruntime {
namespace {

// Scratch memory of a call.
class Scratch {
 public:
  Scratch(const Api& api, Allocator* allocator) : api_(api), allocator_(allocator) {}
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  ~Scratch() {
    if (data_ != nullptr) {
      allocator_->free(allocator_, data_);
    }
  }

  // Once.
  Status Allocate(const OrtKernelContext* context, std::size_t bytes) {
    const Status given = Take(api_, api_.KernelContext_GetScratchBuffer(
                                        context, allocator_->info(allocator_), bytes, &data_));
    return given.ok() && (data_ != nullptr || bytes == 0)
               ? Status()
               : Status(DYNAMO_MOE_OUT_OF_MEMORY,
                        Text("there are no ", bytes, " bytes of the device's memory",
                             given.ok() ? "" : ": ", given.message()));
  }

  void* data() const { return data_; }

 private:
  const Api& api_;
  Allocator* allocator_;
  void* data_ = nullptr;
};

TensorDescription DescriptionOf(const TensorType& type) {
  return {DtypeCode(type.type), static_cast<std::int32_t>(type.type),
          static_cast<std::int32_t>(type.sizes.size()), type.sizes.data()};
}

// What is missing can be made.
Status WithAdvice(const Status& status) {
  return status.ok()
             ? status
             : Status(status.code(), Text(status.message(),
                                          "; make a bundle of this file with dynamo-moe "
                                          "compile, and name it by the session's entry ",
                                          kKernelsEntry, " before the library is registered"));
}

}  // namespace

// A call's inputs, their types, and where they lie.
struct CudaKernel::Inputs {
  NodeCall call = {};
  std::array<TensorType, kMaxInputs> types;
  std::array<const void*, kMaxInputs> data = {};

  // y has x's type.
  void Complete(const Node& node, std::int32_t inputs) {
    call.node = node;
    call.runtime = "ONNX";
    call.inputs = inputs;
    call.descriptions[static_cast<std::size_t>(inputs)] = call.descriptions[0];
  }
};

Status CudaKernel::Create(const Api& api, const CudaNode& node, const OrtKernelInfo* info,
                          std::unique_ptr<CudaKernel>* kernel) {
  std::unique_ptr<CudaKernel> made(new CudaKernel(api));
  Allocator* allocator = nullptr;
  made->node_ = node.node;
  made->name_ = NodeName(api, info);
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.KernelInfo_GetLogger(info, &made->logger_)));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.KernelInfoGetAllocator(info, kDefaultMemory, &allocator)));
  made->allocator_ = {allocator, {api.ReleaseAllocator}};
  DYNAMO_MOE_RETURN_IF_ERROR(made->TakeKernels(node, info));
  // A call may be captured: what a capture forbids is done now, or by a call before it.
  DYNAMO_MOE_RETURN_IF_ERROR(made->kernels_->Prepare());
  if (node.offloaded) {
    DYNAMO_MOE_RETURN_IF_ERROR(made->OpenCache(&made->first_cache_));
  }
  *kernel = std::move(made);
  return {};
}

Status CudaKernel::TakeKernels(const CudaNode& node, const OrtKernelInfo* info) {
  const KernelAttributes attributes(api_, info);
  dynamo_moe_layer layer = {};
  std::string path;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadAttributes(attributes, node_, kKernelLimits, &layer));
  if (node.offloaded) {
    DYNAMO_MOE_RETURN_IF_ERROR(ReadOffload(attributes, &layer, &offload_));
  }
  attributes.Text(kKernels, &path);
  DYNAMO_MOE_RETURN_IF_ERROR(
      WithAdvice(LayerBundle::Open(path.empty() ? node.kernels : path, layer, &bundle_)));
  Inputs inputs;
  DYNAMO_MOE_RETURN_IF_ERROR(DescribeNode(info, &inputs));
  DYNAMO_MOE_RETURN_IF_ERROR(CompleteLayer(inputs.call, &layer));
  return WithAdvice(bundle_->Take(layer, &kernels_));
}

Status CudaKernel::DescribeNode(const OrtKernelInfo* info, Inputs* inputs) {
  std::size_t count = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.KernelInfo_GetInputCount(info, &count)));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCounts(node_, static_cast<std::int64_t>(count), kOutputs));
  for (std::size_t i = 0; i < count; ++i) {
    int is_constant = 0;
    const OrtValue* value = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api_, api_.KernelInfoGetConstantInput_tensor(info, i, &is_constant, &value)));
    is_constant_[i] = is_constant != 0 && value != nullptr;
    if (is_constant_[i]) {
      DYNAMO_MOE_RETURN_IF_ERROR(TypeOf(api_, value, &constants_[i]));
      inputs->call.descriptions[i] = DescriptionOf(constants_[i]);
      continue;
    }
    bool found = false;
    DYNAMO_MOE_RETURN_IF_ERROR(TypeOfInput(api_, info, i, &found, &inputs->types[i]));
    if (found) {
      TensorDescription& description = inputs->call.descriptions[i];
      description = DescriptionOf(inputs->types[i]);
      description.rank = description.rank == 0 ? TensorDescription::kUnknownRank : description.rank;
    }
  }
  inputs_ = static_cast<std::int32_t>(count);
  inputs->Complete(node_, inputs_);
  return {};
}

Status CudaKernel::Gather(const OrtKernelContext* context, Inputs* inputs) const {
  for (std::size_t i = 0; i < static_cast<std::size_t>(inputs_); ++i) {
    const OrtValue* value = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.KernelContext_GetInput(context, i, &value)));
    if (value == nullptr) {
      continue;
    }
    if (!is_constant_[i]) {
      DYNAMO_MOE_RETURN_IF_ERROR(TypeOf(api_, value, &inputs->types[i]));
    }
    inputs->call.descriptions[i] =
        DescriptionOf(is_constant_[i] ? constants_[i] : inputs->types[i]);
    void* data = nullptr;
    // The interface has no other way to read; nothing is written.
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data)));
    inputs->data[i] = data;
  }
  inputs->Complete(node_, inputs_);
  return CheckCall(kernels_->layer(), inputs->call);
}

Status CudaKernel::Compute(OrtKernelContext* context) {
  if (!called_.exchange(true)) {
    bundle_.reset();
  }
  Inputs inputs;
  DYNAMO_MOE_RETURN_IF_ERROR(Gather(context, &inputs));
  const TensorDescription& x = inputs.call.at(0);
  OrtValue* output = nullptr;
  void* y = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api_, api_.KernelContext_GetOutput(context, 0, x.sizes, static_cast<std::size_t>(x.rank),
                                              &output)));
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.GetTensorMutableData(output, &y)));
  const std::int64_t tokens = Tokens(x);
  if (tokens == 0) {
    return {};
  }
  void* stream = nullptr;
  std::shared_ptr<Cache> cache;
  std::size_t bytes = 0;
  Scratch workspace(api_, allocator_.get());
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.KernelContext_GetGPUComputeStream(context, &stream)));
  DYNAMO_MOE_RETURN_IF_ERROR(CacheFor(stream, &cache));
  DYNAMO_MOE_RETURN_IF_ERROR(kernels_->WorkspaceSize(tokens, &bytes));
  DYNAMO_MOE_RETURN_IF_ERROR(workspace.Allocate(context, bytes));
  return kernels_->Enqueue(tokens, TensorsOf(kernels_->layer(), inputs.data.data(), y),
                           workspace.data(), stream, cache.get());
}

Status CudaKernel::CacheFor(void* stream, std::shared_ptr<Cache>* cache) {
  if (kernels_->layer().resident_experts == 0) {
    return {};
  }
  const std::scoped_lock lock(mutex_);
  std::shared_ptr<Cache>& found = caches_[offload_.shared ? nullptr : stream];
  if (found == nullptr && first_cache_ != nullptr) {
    found = std::move(first_cache_);
  } else if (found == nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(OpenCache(&found));
  }
  *cache = found;
  return {};
}

Status CudaKernel::OpenCache(std::shared_ptr<Cache>* cache) const {
  std::shared_ptr<Cache> opened;
  DYNAMO_MOE_RETURN_IF_ERROR(Cache::Open(*kernels_, offload_, &opened));
  DYNAMO_MOE_RETURN_IF_ERROR(opened->Prepare());
  Log(kInfoLog, opened->TakeSummary("stream"));
  Log(kWarningLog, opened->TakeWarning());
  *cache = std::move(opened);
  return {};
}

void CudaKernel::Log(LogLevel level, const std::string& text) const {
  if (!text.empty()) {
    const std::string message = Text(NameOf(node_), " '", name_, "': ", text);
    // What cannot be logged is not said.
    static_cast<void>(Take(api_, api_.Logger_LogMessage(logger_, level, message.c_str(),
                                                        "cuda_kernel.cc", __LINE__, "Log")));
  }
}

}  // namespace dynamo_moe::onnxruntime
