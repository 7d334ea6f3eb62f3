// Compares our declaration of ONNX Runtime's interface with its header, if that is installed. It
// names each difference, and fails if there is one.
#ifdef DYNAMO_MOE_ONNXRUNTIME_SDK

#include <onnxruntime_c_api.h>

#include <cstddef>
#include <cstdio>
#include <string>
#include <type_traits>

#include "onnxruntime/ort_abi.h"

// A function's type without its warning about ignored results is what is compared.
#pragma GCC diagnostic ignored "-Wignored-attributes"

namespace {

namespace ours = dynamo_moe::onnxruntime;

int checks = 0;
int differences = 0;

void Same(const char* what, const std::string& declared, const std::string& theirs) {
  ++checks;
  if (declared != theirs) {
    ++differences;
    std::printf("%s: declared %s, the header has %s\n", what, declared.c_str(), theirs.c_str());
  }
}

void Same(const char* what, long long declared, long long theirs) {
  Same(what, std::to_string(declared), std::to_string(theirs));
}

// The text names the type.
template <typename Record>
std::string RecordName() {
  return __PRETTY_FUNCTION__;
}

// What a type is to a caller: a pointer to something, an integer of a size, a record.
template <typename Type>
std::string KindOf() {
  using Plain = std::remove_cv_t<Type>;
  if constexpr (std::is_pointer_v<Plain>) {
    using Target = std::remove_pointer_t<Plain>;
    return std::is_function_v<Target> ? "function" : KindOf<Target>() + "*";
  } else if constexpr (std::is_enum_v<Plain>) {
    return "enumeration of " + std::to_string(sizeof(Plain));
  } else if constexpr (std::is_floating_point_v<Plain>) {
    return "float of " + std::to_string(sizeof(Plain));
  } else if constexpr (std::is_integral_v<Plain>) {
    return (std::is_signed_v<Plain> ? "integer of " : "unsigned integer of ") +
           std::to_string(sizeof(Plain));
  } else if constexpr (std::is_void_v<Plain>) {
    return "void";
  } else if constexpr (std::is_same_v<Plain, ours::Allocator>) {
    return RecordName<OrtAllocator>();
  } else if constexpr (std::is_same_v<Plain, ours::CustomOp>) {
    return RecordName<OrtCustomOp>();
  } else {
    return RecordName<Plain>();
  }
}

template <typename Type>
struct Signature;
template <typename Result, typename... Arguments>
struct Signature<Result (*)(Arguments...)> {
  static std::string Text() {
    std::string text = KindOf<Result>() + "(";
    ((text += KindOf<Arguments>() + ", "), ...);
    return text + ")";
  }
};
template <typename Result, typename... Arguments>
struct Signature<Result (*)(Arguments...) noexcept> : Signature<Result (*)(Arguments...)> {};

void CheckEntries() {
#define SAME_ENTRY(name, place, ...)                                      \
  Same("place of " #name, place, offsetof(OrtApi, name) / sizeof(void*)); \
  Same("type of " #name, Signature<decltype(ours::Api::name)>::Text(),    \
       Signature<decltype(OrtApi::name)>::Text());
  DYNAMO_MOE_ORT_ENTRIES(SAME_ENTRY)
#if ORT_API_VERSION >= 18
  DYNAMO_MOE_ORT_GPU_ENTRIES(SAME_ENTRY)
#endif
}

void CheckRecords() {
#define SAME_FIELD(record, field, theirs, their_field)                       \
  Same("offset of " #theirs "." #their_field, offsetof(ours::record, field), \
       offsetof(theirs, their_field));                                       \
  Same("size of " #theirs "." #their_field, sizeof(ours::record::field),     \
       sizeof(theirs::their_field))
#define SAME_FUNCTION(record, field, theirs, their_field)                                     \
  SAME_FIELD(record, field, theirs, their_field);                                             \
  Same("type of " #theirs "." #their_field, Signature<decltype(ours::record::field)>::Text(), \
       Signature<decltype(theirs::their_field)>::Text())
  SAME_FUNCTION(ApiBase, get_api, OrtApiBase, GetApi);
  SAME_FUNCTION(ApiBase, get_version_string, OrtApiBase, GetVersionString);
  SAME_FIELD(Allocator, version, OrtAllocator, version);
  SAME_FUNCTION(Allocator, alloc, OrtAllocator, Alloc);
  SAME_FUNCTION(Allocator, free, OrtAllocator, Free);
  SAME_FUNCTION(Allocator, info, OrtAllocator, Info);
  SAME_FIELD(CustomOp, version, OrtCustomOp, version);
  SAME_FUNCTION(CustomOp, create_kernel, OrtCustomOp, CreateKernel);
  SAME_FUNCTION(CustomOp, get_name, OrtCustomOp, GetName);
  SAME_FUNCTION(CustomOp, get_provider, OrtCustomOp, GetExecutionProviderType);
  SAME_FUNCTION(CustomOp, get_input_type, OrtCustomOp, GetInputType);
  SAME_FUNCTION(CustomOp, get_input_count, OrtCustomOp, GetInputTypeCount);
  SAME_FUNCTION(CustomOp, get_output_type, OrtCustomOp, GetOutputType);
  SAME_FUNCTION(CustomOp, get_output_count, OrtCustomOp, GetOutputTypeCount);
  SAME_FUNCTION(CustomOp, compute, OrtCustomOp, KernelCompute);
  SAME_FUNCTION(CustomOp, destroy_kernel, OrtCustomOp, KernelDestroy);
  SAME_FUNCTION(CustomOp, get_input_characteristic, OrtCustomOp, GetInputCharacteristic);
  SAME_FUNCTION(CustomOp, get_output_characteristic, OrtCustomOp, GetOutputCharacteristic);
  SAME_FUNCTION(CustomOp, get_input_memory, OrtCustomOp, GetInputMemoryType);
  SAME_FUNCTION(CustomOp, get_variadic_input_least, OrtCustomOp, GetVariadicInputMinArity);
  SAME_FUNCTION(CustomOp, get_variadic_input_homogeneity, OrtCustomOp, GetVariadicInputHomogeneity);
  SAME_FUNCTION(CustomOp, get_variadic_output_least, OrtCustomOp, GetVariadicOutputMinArity);
  SAME_FUNCTION(CustomOp, get_variadic_output_homogeneity, OrtCustomOp,
                GetVariadicOutputHomogeneity);
  SAME_FUNCTION(CustomOp, create_kernel_v2, OrtCustomOp, CreateKernelV2);
  SAME_FUNCTION(CustomOp, compute_v2, OrtCustomOp, KernelComputeV2);
  SAME_FUNCTION(CustomOp, infer_shape, OrtCustomOp, InferOutputShapeFn);
  SAME_FUNCTION(CustomOp, get_start_version, OrtCustomOp, GetStartVersion);
  SAME_FUNCTION(CustomOp, get_end_version, OrtCustomOp, GetEndVersion);
}

void CheckValues() {
#define SAME_VALUE(name, theirs) Same(#theirs, ours::name, theirs)
  SAME_VALUE(kUndefined, ONNX_TENSOR_ELEMENT_DATA_TYPE_UNDEFINED);
  SAME_VALUE(kFloatElements, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT);
  SAME_VALUE(kInt8Elements, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT8);
  SAME_VALUE(kInt32Elements, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT32);
  SAME_VALUE(kInt64Elements, ONNX_TENSOR_ELEMENT_DATA_TYPE_INT64);
  SAME_VALUE(kFloat16Elements, ONNX_TENSOR_ELEMENT_DATA_TYPE_FLOAT16);
  SAME_VALUE(kDoubleElements, ONNX_TENSOR_ELEMENT_DATA_TYPE_DOUBLE);
  SAME_VALUE(kBfloat16Elements, ONNX_TENSOR_ELEMENT_DATA_TYPE_BFLOAT16);
  SAME_VALUE(kFail, ORT_FAIL);
  SAME_VALUE(kInvalidArgument, ORT_INVALID_ARGUMENT);
  SAME_VALUE(kIntAttribute, ORT_OP_ATTR_INT);
  SAME_VALUE(kFloatAttribute, ORT_OP_ATTR_FLOAT);
  SAME_VALUE(kRequired, INPUT_OUTPUT_REQUIRED);
  SAME_VALUE(kOptional, INPUT_OUTPUT_OPTIONAL);
  SAME_VALUE(kArenaAllocator, OrtArenaAllocator);
  SAME_VALUE(kDefaultMemory, OrtMemTypeDefault);
  SAME_VALUE(kInfoLog, ORT_LOGGING_LEVEL_INFO);
  SAME_VALUE(kWarningLog, ORT_LOGGING_LEVEL_WARNING);
}

}  // namespace

int main() {
  CheckEntries();
  CheckRecords();
  CheckValues();
  std::printf("ONNX Runtime 1.%d: %d of %d checks differ\n", ORT_API_VERSION, differences, checks);
  return differences == 0 ? 0 : 1;
}

#endif  // DYNAMO_MOE_ONNXRUNTIME_SDK
