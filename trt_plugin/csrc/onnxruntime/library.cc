// What ONNX Runtime looks for in a library of operators.
#include <cstddef>
#include <cstdint>
#include <limits>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "bundle/format.h"
#include "dynamo_moe.h"
#include "node/node.h"
#include "onnxruntime/kernel.h"
#include "onnxruntime/node_info.h"
#include "onnxruntime/ort_abi.h"
#include "onnxruntime/runtime.h"

namespace dynamo_moe::onnxruntime {
namespace {

constexpr const char* kDomain = "moe";
constexpr const char* kProvider = "CPUExecutionProvider";
constexpr Node kNodes[] = {{format::kDropless, false},
                           {format::kExpertsOnly, false},
                           {format::kDropless, true},
                           {format::kExpertsOnly, true}};

// A node's operator, for tokens of one dtype: old versions of the runtime do not find out the dtype
// of a result otherwise. The runtime passes it to each of its functions.
struct LayerOp : CustomOp {
  Api api;
  Node node;
  ElementType tokens;
};

const LayerOp& Self(const CustomOp* op) { return *static_cast<const LayerOp*>(op); }

const Node& NodeOf(const CustomOp* op) { return Self(op).node; }

OrtStatus* CreateKernel(const CustomOp* self, const OrtApi* /*api*/, const OrtKernelInfo* info,
                        void** kernel) {
  const LayerOp& op = Self(self);
  std::unique_ptr<Kernel> made;
  const Status status = Caught([&]() -> Status {
    const Status created = Kernel::Create(op.api, op.node, info, &made);
    return created.ok()
               ? created
               : Status(created.code(), Text(NameOf(NodeOf(self)), " '", NodeName(op.api, info),
                                             "': ", created.message()));
  });
  *kernel = made.release();
  return Give(op.api, status);
}

// NOLINTBEGIN(misc-const-correctness): the types are the interface's.
OrtStatus* Compute(void* kernel, OrtKernelContext* context) {
  const Kernel& computed = *static_cast<const Kernel*>(kernel);
  return Give(computed.api(), Caught([&] { return computed.Compute(context); }));
}

// y has x's shape and type.
OrtStatus* InferShape(const CustomOp* self, OrtShapeInferContext* context) {
  const Api& api = Self(self).api;
  OrtTensorTypeAndShapeInfo* x = nullptr;
  OrtStatus* const status = api.ShapeInferContext_GetInputTypeShape(context, 0, &x);
  // The runtime releases it with the context.
  return status != nullptr ? status : api.ShapeInferContext_SetOutputTypeShape(context, 0, x);
}
// NOLINTEND(misc-const-correctness)

void MakeOp(const Api& api, const Node& node, ElementType tokens, LayerOp* op) {
  op->api = api;
  op->node = node;
  op->tokens = tokens;
  op->version = kApiVersion;
  op->get_name = [](const CustomOp* self) { return NameOf(NodeOf(self)); };
  op->get_provider = [](const CustomOp*) { return kProvider; };
  op->get_input_type = [](const CustomOp* self, std::size_t index) {
    return index == 0 ? Self(self).tokens : kUndefined;
  };
  op->get_input_count = [](const CustomOp* self) { return InputsOf(NodeOf(self)).size(); };
  op->get_output_type = [](const CustomOp* self, std::size_t) { return Self(self).tokens; };
  op->get_output_count = [](const CustomOp*) -> std::size_t { return 1; };
  op->destroy_kernel = [](void* kernel) { delete static_cast<Kernel*>(kernel); };
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
  op->create_kernel_v2 = CreateKernel;
  op->compute_v2 = Compute;
  op->infer_shape = InferShape;
  op->get_start_version = [](const CustomOp*) { return std::int32_t{1}; };
  op->get_end_version = [](const CustomOp*) { return std::numeric_limits<std::int32_t>::max(); };
}

// The operators of one copy of the runtime. They stay: sessions use them until the process ends.
struct Ops {
  std::list<LayerOp> all;
  OrtCustomOpDomain* domain = nullptr;
};

Status MakeOps(const Api& api, Ops* ops) {
  OrtCustomOpDomain* domain = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CreateCustomOpDomain(kDomain, &domain)));
  for (const Node& node : kNodes) {
    // Kernels refuse float64, with a message of their own.
    for (const ElementType tokens :
         {kFloatElements, kFloat16Elements, kBfloat16Elements, kDoubleElements}) {
      MakeOp(api, node, tokens, &ops->all.emplace_back());
      DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CustomOpDomain_Add(domain, &ops->all.back())));
    }
  }
  ops->domain = domain;
  return {};
}

Status Register(const Api& api, const OrtApi* runtime, OrtSessionOptions* options) {
  static std::mutex mutex;
  static auto* const all = new std::map<const OrtApi*, Ops>;
  const std::scoped_lock lock(mutex);
  Ops& ops = (*all)[runtime];
  if (ops.domain == nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(MakeOps(api, &ops));
  }
  return Take(api, api.AddCustomOpDomain(options, ops.domain));
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
  const ort::Api api(runtime);
  return ort::Give(api, ort::Caught([&] { return ort::Register(api, runtime, options); }));
}
