// What ONNX Runtime looks for in a library of operators.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "bundle/format.h"
#include "dynamo_moe.h"
#include "node/node.h"
#include "onnxruntime/cuda_kernel.h"
#include "onnxruntime/kernel.h"
#include "onnxruntime/node_info.h"
#include "onnxruntime/ort_abi.h"
#include "onnxruntime/runtime.h"

namespace dynamo_moe::onnxruntime {
namespace {

constexpr const char* kDomain = "moe";
// Of nodes whose weights lie in files.
constexpr const char* kOffloadedDomain = "moe.offloaded";
constexpr Node kNodes[] = {{format::kDropless, false},
                           {format::kExpertsOnly, false},
                           {format::kDropless, true},
                           {format::kExpertsOnly, true}};

// A node's operator on one provider, for tokens of one dtype: old versions of the runtime do not
// find out the dtype of a result otherwise. The runtime passes it to each of its functions.
struct LayerOp : CustomOp {
  Api api;
  CudaNode node;
  const char* provider;
  ElementType tokens;
};

const LayerOp& Self(const CustomOp* op) { return *static_cast<const LayerOp*>(op); }

const Node& NodeOf(const CustomOp* op) { return Self(op).node.node; }

Status Create(const LayerOp& op, const OrtKernelInfo* info, std::unique_ptr<Kernel>* kernel) {
  return Kernel::Create(op.api, op.node.node, info, kernel);
}

Status Create(const LayerOp& op, const OrtKernelInfo* info, std::unique_ptr<CudaKernel>* kernel) {
  return CudaKernel::Create(op.api, op.node, info, kernel);
}

template <typename KernelType>
OrtStatus* CreateKernel(const CustomOp* self, const OrtApi* /*api*/, const OrtKernelInfo* info,
                        void** kernel) {
  const LayerOp& op = Self(self);
  std::unique_ptr<KernelType> made;
  const Status status = Caught([&]() -> Status {
    const Status created = Create(op, info, &made);
    return created.ok()
               ? created
               : Status(created.code(), Text(NameOf(NodeOf(self)), " '", NodeName(op.api, info),
                                             "': ", created.message()));
  });
  *kernel = made.release();
  return Give(op.api, status);
}

// NOLINTBEGIN(misc-const-correctness): the types are the interface's.
template <typename KernelType>
OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
  auto& computed = *static_cast<KernelType*>(kernel);
  return Give(computed.api(), Caught([&] { return computed.Compute(context); }));
}

// Whether each size of a tensor is a number or has a name.
Status HasShape(const Api& api, const OrtTensorTypeAndShapeInfo* tensor, bool* has_shape) {
  std::size_t rank = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetDimensionsCount(tensor, &rank)));
  std::vector<std::int64_t> sizes(rank);
  std::vector<const char*> names(rank);
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetDimensions(tensor, sizes.data(), rank)));
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetSymbolicDimensions(tensor, names.data(), rank)));
  *has_shape = true;
  for (std::size_t axis = 0; axis < rank; ++axis) {
    *has_shape = *has_shape && (sizes[axis] >= 0 || *names[axis] != '\0');
  }
  return {};
}

// y has x's shape and type. The runtime would take a size that it does not know for the number -1.
OrtStatus* InferShape(const CustomOp* self, OrtShapeInferContext* context) {
  const Api& api = Self(self).api;
  return Give(api, Caught([&]() -> Status {
                OrtTensorTypeAndShapeInfo* x = nullptr;  // The runtime releases it.
                DYNAMO_MOE_RETURN_IF_ERROR(
                    Take(api, api.ShapeInferContext_GetInputTypeShape(context, 0, &x)));
                bool has_shape = false;
                DYNAMO_MOE_RETURN_IF_ERROR(HasShape(api, x, &has_shape));
                return has_shape
                           ? Take(api, api.ShapeInferContext_SetOutputTypeShape(context, 0, x))
                           : Status();
              }));
}
// NOLINTEND(misc-const-correctness)

// On the provider of a type of kernels.
template <typename KernelType>
void MakeOp(const Api& api, const CudaNode& node, ElementType tokens, LayerOp* op) {
  op->api = api;
  op->node = node;
  op->tokens = tokens;
  op->provider =
      std::is_same_v<KernelType, CudaKernel> ? "CUDAExecutionProvider" : "CPUExecutionProvider";
  op->version = kApiVersion;
  op->get_name = [](const CustomOp* self) { return NameOf(NodeOf(self)); };
  op->get_provider = [](const CustomOp* self) { return Self(self).provider; };
  op->get_input_type = [](const CustomOp* self, std::size_t index) {
    return index == 0 ? Self(self).tokens : kUndefined;
  };
  op->get_input_count = [](const CustomOp* self) { return InputsOf(NodeOf(self)).size(); };
  op->get_output_type = [](const CustomOp* self, std::size_t) { return Self(self).tokens; };
  op->get_output_count = [](const CustomOp*) -> std::size_t { return 1; };
  op->destroy_kernel = [](void* kernel) { delete static_cast<KernelType*>(kernel); };
  op->get_input_characteristic = [](const CustomOp* self, std::size_t index) {
    return index < RequiredInputs(NodeOf(self)) ? kRequired : kOptional;
  };
  op->get_output_characteristic = [](const CustomOp*, std::size_t) { return kRequired; };
  op->get_input_memory = [](const CustomOp*, std::size_t) { return kDefaultMemory; };
  const auto none = [](const CustomOp*) { return std::int32_t{0}; };
  op->get_variadic_input_least = none;
  op->get_variadic_input_homogeneity = none;
  op->get_variadic_output_least = none;
  op->get_variadic_output_homogeneity = none;
  op->create_kernel_v2 = CreateKernel<KernelType>;
  op->compute_v2 = Compute<KernelType>;
  op->infer_shape = InferShape;
  op->get_start_version = [](const CustomOp*) { return std::int32_t{1}; };
  op->get_end_version = [](const CustomOp*) { return std::numeric_limits<std::int32_t>::max(); };
}

// The operators of one copy of the runtime and one bundle. They stay: sessions use them until the
// process ends.
struct Ops {
  std::list<LayerOp> all;
  std::vector<OrtCustomOpDomain*> domains;
};

template <typename KernelType>
Status AddOps(const Api& api, const CudaNode& node, OrtCustomOpDomain* domain, Ops* ops) {
  // Kernels refuse float64, with a message of their own.
  for (const ElementType tokens :
       {kFloatElements, kFloat16Elements, kBfloat16Elements, kDoubleElements}) {
    MakeOp<KernelType>(api, node, tokens, &ops->all.emplace_back());
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CustomOpDomain_Add(domain, &ops->all.back())));
  }
  return {};
}

Status MakeOps(const Api& api, const std::string& kernels, Ops* ops) {
  OrtCustomOpDomain* domain = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CreateCustomOpDomain(kDomain, &domain)));
  ops->domains.push_back(domain);
  for (const Node& node : kNodes) {
    DYNAMO_MOE_RETURN_IF_ERROR(AddOps<Kernel>(api, {node, false, kernels}, domain, ops));
    if (api.HasGpuEntries()) {
      DYNAMO_MOE_RETURN_IF_ERROR(AddOps<CudaKernel>(api, {node, false, kernels}, domain, ops));
    }
  }
  if (!api.HasGpuEntries()) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CreateCustomOpDomain(kOffloadedDomain, &domain)));
  ops->domains.push_back(domain);
  for (const Node& node : kNodes) {
    DYNAMO_MOE_RETURN_IF_ERROR(AddOps<CudaKernel>(api, {node, true, kernels}, domain, ops));
  }
  return {};
}

// Whether the runtime has the entries for GPUs. Asked for a version that it lacks, 1.17 writes a
// line to stderr.
bool HasGpuEntries(const ApiBase& base) {
  char* end = nullptr;
  const unsigned long major = std::strtoul(base.get_version_string(), &end, 10);
  const unsigned long minor = *end == '.' ? std::strtoul(end + 1, nullptr, 10) : 0;
  return (major > 1 || minor >= kGpuApiVersion) && base.get_api(kGpuApiVersion) != nullptr;
}

// The path that the session's options give, or "".
Status ReadKernelsEntry(const Api& api, const OrtSessionOptions* options, std::string* path) {
  int found = 0;
  std::size_t size = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.HasSessionConfigEntry(options, kKernelsEntry, &found)));
  if (found == 0) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.GetSessionConfigEntry(options, kKernelsEntry, nullptr, &size)));
  path->assign(size, '\0');
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.GetSessionConfigEntry(options, kKernelsEntry, path->data(), &size)));
  path->resize(std::strlen(path->c_str()));
  return {};
}

Status Register(const Api& api, const OrtApi* runtime, OrtSessionOptions* options) {
  static std::mutex mutex;
  static auto* const all = new std::map<std::pair<const OrtApi*, std::string>, Ops>;
  std::string kernels;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadKernelsEntry(api, options, &kernels));
  const std::scoped_lock lock(mutex);
  Ops& ops = (*all)[{runtime, kernels}];
  if (ops.domains.empty()) {
    Ops made;
    DYNAMO_MOE_RETURN_IF_ERROR(MakeOps(api, kernels, &made));
    ops = std::move(made);
  }
  for (OrtCustomOpDomain* const domain : ops.domains) {
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.AddCustomOpDomain(options, domain)));
  }
  return {};
}

}  // namespace
}  // namespace dynamo_moe::onnxruntime

extern "C" DYNAMO_MOE_API OrtStatus* RegisterCustomOps(
    OrtSessionOptions* options, const dynamo_moe::onnxruntime::ApiBase* base) {
  namespace ort = dynamo_moe::onnxruntime;
  const OrtApi* const runtime = base->get_api(ort::kApiVersion);
  if (runtime == nullptr) {
    // The first entry is the same in every version.
    const auto* const first = reinterpret_cast<const ort::CreateStatusEntry*>(base->get_api(1));
    const std::string text =
        dynamo_moe::Text("libdynamo_moe.so needs ONNX Runtime 1.", ort::kApiVersion,
                         " or later, got ", base->get_version_string());
    return first == nullptr ? nullptr : (*first)(ort::kFail, text.c_str());
  }
  const ort::Api api(runtime, ort::HasGpuEntries(*base));
  return ort::Give(api, ort::Caught([&] { return ort::Register(api, runtime, options); }));
}
