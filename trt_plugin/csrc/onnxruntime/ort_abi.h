// ONNX Runtime's C interface, as far as the operators need it: its own header is no part of the
// project, and nothing links to the runtime.
//
// The interface is a table of functions, which a later version only adds to. An entry here is its
// place in the table with its type; enumerations are the integers that C makes of them. Where the
// runtime's header is installed, abi_check.cc compares the two.
#pragma once

#include <cstddef>
#include <cstdint>

struct OrtApi;
struct OrtCustomOpDomain;
struct OrtKernelContext;
struct OrtKernelInfo;
struct OrtLogger;
struct OrtMemoryInfo;
struct OrtOp;
struct OrtOpAttr;
struct OrtSessionOptions;
struct OrtShapeInferContext;
struct OrtStatus;
struct OrtTensorTypeAndShapeInfo;
struct OrtTypeInfo;
struct OrtValue;

namespace dynamo_moe::onnxruntime {

// The oldest runtime that has the entries, 1.17, and the oldest that has those for GPUs, 1.18.
inline constexpr std::uint32_t kApiVersion = 17;
inline constexpr std::uint32_t kGpuApiVersion = 18;

struct ApiBase {
  const OrtApi* (*get_api)(std::uint32_t version);  // Null for a version that is not known yet.
  const char* (*get_version_string)();
};

struct Allocator {
  std::uint32_t version;
  void* (*alloc)(Allocator* self, std::size_t bytes);
  void (*free)(Allocator* self, void* memory);
  const OrtMemoryInfo* (*info)(const Allocator* self);
};

enum ElementType : std::int32_t {
  kUndefined = 0,  // Of an input: any.
  kFloatElements = 1,
  kInt8Elements = 3,
  kInt32Elements = 6,
  kInt64Elements = 7,
  kFloat16Elements = 10,
  kDoubleElements = 11,
  kBfloat16Elements = 16,
};

enum ErrorCode : std::int32_t { kFail = 1, kInvalidArgument = 2 };
enum AttributeType : std::int32_t { kIntAttribute = 1, kFloatAttribute = 3 };
enum Characteristic : std::int32_t { kRequired = 0, kOptional = 1 };
enum AllocatorType : std::int32_t { kArenaAllocator = 1 };
enum MemoryType : std::int32_t { kDefaultMemory = 0 };
enum LogLevel : std::int32_t { kInfoLog = 1, kWarningLog = 2 };

using Task = void (*)(void* data, std::size_t index);

// Name, place, type.
#define DYNAMO_MOE_ORT_ENTRIES(ENTRY)                                                              \
  ENTRY(CreateStatus, 0, OrtStatus*(ErrorCode code, const char* message))                          \
  ENTRY(GetErrorMessage, 2, const char*(const OrtStatus* status))                                  \
  ENTRY(CreateCustomOpDomain, 26, OrtStatus*(const char* name, OrtCustomOpDomain** domain))        \
  ENTRY(CustomOpDomain_Add, 27, OrtStatus*(OrtCustomOpDomain * domain, const CustomOp* op))        \
  ENTRY(AddCustomOpDomain, 28,                                                                     \
        OrtStatus*(OrtSessionOptions * options, OrtCustomOpDomain * domain))                       \
  ENTRY(                                                                                           \
      CreateTensorWithDataAsOrtValue, 49,                                                          \
      OrtStatus*(const OrtMemoryInfo* memory, void* data, std::size_t bytes,                       \
                 const std::int64_t* sizes, std::size_t rank, ElementType type, OrtValue** value)) \
  ENTRY(GetTensorMutableData, 51, OrtStatus*(OrtValue * value, void** data))                       \
  ENTRY(CastTypeInfoToTensorInfo, 55,                                                              \
        OrtStatus*(const OrtTypeInfo* type, const OrtTensorTypeAndShapeInfo** tensor))             \
  ENTRY(GetTensorElementType, 60,                                                                  \
        OrtStatus*(const OrtTensorTypeAndShapeInfo* info, ElementType* type))                      \
  ENTRY(GetDimensionsCount, 61,                                                                    \
        OrtStatus*(const OrtTensorTypeAndShapeInfo* info, std::size_t* rank))                      \
  ENTRY(GetDimensions, 62,                                                                         \
        OrtStatus*(const OrtTensorTypeAndShapeInfo* info, std::int64_t* sizes, std::size_t rank))  \
  ENTRY(GetSymbolicDimensions, 63,                                                                 \
        OrtStatus*(const OrtTensorTypeAndShapeInfo* info, const char** names, std::size_t rank))   \
  ENTRY(GetTensorTypeAndShape, 65,                                                                 \
        OrtStatus*(const OrtValue* value, OrtTensorTypeAndShapeInfo** info))                       \
  ENTRY(CreateCpuMemoryInfo, 69,                                                                   \
        OrtStatus*(AllocatorType allocator, MemoryType type, OrtMemoryInfo * *memory))             \
  ENTRY(KernelInfoGetAttribute_float, 85,                                                          \
        OrtStatus*(const OrtKernelInfo* info, const char* name, float* value))                     \
  ENTRY(KernelInfoGetAttribute_int64, 86,                                                          \
        OrtStatus*(const OrtKernelInfo* info, const char* name, std::int64_t* value))              \
  ENTRY(KernelInfoGetAttribute_string, 87,                                                         \
        OrtStatus*(const OrtKernelInfo* info, const char* name, char* text, std::size_t* size))    \
  ENTRY(KernelContext_GetInput, 90,                                                                \
        OrtStatus*(const OrtKernelContext* context, std::size_t index, const OrtValue** value))    \
  ENTRY(KernelContext_GetOutput, 91,                                                               \
        OrtStatus*(OrtKernelContext * context, std::size_t index, const std::int64_t* sizes,       \
                   std::size_t rank, OrtValue** value))                                            \
  ENTRY(ReleaseStatus, 93, void(OrtStatus * status))                                               \
  ENTRY(ReleaseMemoryInfo, 94, void(OrtMemoryInfo * memory))                                       \
  ENTRY(ReleaseValue, 96, void(OrtValue * value))                                                  \
  ENTRY(ReleaseTypeInfo, 98, void(OrtTypeInfo * info))                                             \
  ENTRY(ReleaseTensorTypeAndShapeInfo, 99, void(OrtTensorTypeAndShapeInfo * info))                 \
  ENTRY(ReleaseAllocator, 132, void(Allocator * allocator))                                        \
  ENTRY(KernelContext_GetGPUComputeStream, 193,                                                    \
        OrtStatus*(const OrtKernelContext* context, void** stream))                                \
  ENTRY(CreateOpAttr, 211,                                                                         \
        OrtStatus*(const char* name, const void* data, std::int32_t length, AttributeType type,    \
                   OrtOpAttr** attribute))                                                         \
  ENTRY(ReleaseOpAttr, 212, void(OrtOpAttr * attribute))                                           \
  ENTRY(CreateOp, 213,                                                                             \
        OrtStatus*(const OrtKernelInfo* info, const char* name, const char* domain,                \
                   std::int32_t version, const char** type_names, const ElementType* types,        \
                   std::int32_t type_count, const OrtOpAttr* const* attributes,                    \
                   std::int32_t attribute_count, std::int32_t inputs, std::int32_t outputs,        \
                   OrtOp** op))                                                                    \
  ENTRY(                                                                                           \
      InvokeOp, 214,                                                                               \
      OrtStatus*(const OrtKernelContext* context, const OrtOp* op, const OrtValue* const* inputs,  \
                 std::int32_t input_count, OrtValue* const* outputs, std::int32_t output_count))   \
  ENTRY(ReleaseOp, 215, void(OrtOp * op))                                                          \
  ENTRY(KernelInfo_GetInputCount, 230, OrtStatus*(const OrtKernelInfo* info, std::size_t* count))  \
  ENTRY(KernelInfo_GetInputTypeInfo, 234,                                                          \
        OrtStatus*(const OrtKernelInfo* info, std::size_t index, OrtTypeInfo** type))              \
  ENTRY(HasSessionConfigEntry, 237,                                                                \
        OrtStatus*(const OrtSessionOptions* options, const char* key, int* found))                 \
  ENTRY(GetSessionConfigEntry, 238,                                                                \
        OrtStatus*(const OrtSessionOptions* options, const char* key, char* text,                  \
                   std::size_t* size))                                                             \
  ENTRY(KernelInfo_GetNodeName, 244,                                                               \
        OrtStatus*(const OrtKernelInfo* info, char* name, std::size_t* size))                      \
  ENTRY(KernelInfo_GetLogger, 245,                                                                 \
        OrtStatus*(const OrtKernelInfo* info, const OrtLogger** logger))                           \
  ENTRY(Logger_LogMessage, 247,                                                                    \
        OrtStatus*(const OrtLogger* logger, LogLevel level, const char* message, const char* file, \
                   int line, const char* function))                                                \
  ENTRY(KernelInfoGetConstantInput_tensor, 249,                                                    \
        OrtStatus*(const OrtKernelInfo* info, std::size_t index, int* is_constant,                 \
                   const OrtValue** value))                                                        \
  ENTRY(KernelContext_GetAllocator, 253,                                                           \
        OrtStatus*(const OrtKernelContext* context, const OrtMemoryInfo* memory,                   \
                   Allocator** allocator))                                                         \
  ENTRY(ShapeInferContext_GetInputTypeShape, 268,                                                  \
        OrtStatus*(const OrtShapeInferContext* context, std::size_t index,                         \
                   OrtTensorTypeAndShapeInfo** info))                                              \
  ENTRY(ShapeInferContext_SetOutputTypeShape, 270,                                                 \
        OrtStatus*(const OrtShapeInferContext* context, std::size_t index,                         \
                   const OrtTensorTypeAndShapeInfo* info))                                         \
  ENTRY(KernelContext_ParallelFor, 274,                                                            \
        OrtStatus*(const OrtKernelContext* context, Task task, std::size_t total,                  \
                   std::size_t batches, void* data))

// What the operators for GPUs need besides.
#define DYNAMO_MOE_ORT_GPU_ENTRIES(ENTRY)                                        \
  ENTRY(KernelContext_GetScratchBuffer, 277,                                     \
        OrtStatus*(const OrtKernelContext* context, const OrtMemoryInfo* memory, \
                   std::size_t bytes, void** buffer))                            \
  ENTRY(KernelInfoGetAllocator, 278,                                             \
        OrtStatus*(const OrtKernelInfo* info, MemoryType type, Allocator** allocator))

// The first entry, in whatever version of the table.
using CreateStatusEntry = OrtStatus* (*)(ErrorCode code, const char* message);

// An operator, whose functions the runtime calls. It reads no further than its version goes.
struct CustomOp {
  std::uint32_t version;
  void* (*create_kernel)(const CustomOp* self, const OrtApi* api, const OrtKernelInfo* info);
  const char* (*get_name)(const CustomOp* self);
  const char* (*get_provider)(const CustomOp* self);
  ElementType (*get_input_type)(const CustomOp* self, std::size_t index);
  std::size_t (*get_input_count)(const CustomOp* self);
  ElementType (*get_output_type)(const CustomOp* self, std::size_t index);
  std::size_t (*get_output_count)(const CustomOp* self);
  void (*compute)(void* kernel, OrtKernelContext* context);
  void (*destroy_kernel)(void* kernel);
  Characteristic (*get_input_characteristic)(const CustomOp* self, std::size_t index);
  Characteristic (*get_output_characteristic)(const CustomOp* self, std::size_t index);
  MemoryType (*get_input_memory)(const CustomOp* self, std::size_t index);
  std::int32_t (*get_variadic_input_least)(const CustomOp* self);
  std::int32_t (*get_variadic_input_homogeneity)(const CustomOp* self);
  std::int32_t (*get_variadic_output_least)(const CustomOp* self);
  std::int32_t (*get_variadic_output_homogeneity)(const CustomOp* self);
  OrtStatus* (*create_kernel_v2)(const CustomOp* self, const OrtApi* api, const OrtKernelInfo* info,
                                 void** kernel);
  OrtStatus* (*compute_v2)(void* kernel, OrtKernelContext* context);
  OrtStatus* (*infer_shape)(const CustomOp* self, OrtShapeInferContext* context);
  std::int32_t (*get_start_version)(const CustomOp* self);
  std::int32_t (*get_end_version)(const CustomOp* self);
};

// The entries by name. Those for GPUs are null where the runtime is older.
class Api {
 public:
  Api() = default;
  Api(const OrtApi* api, bool has_gpu_entries) {
    const auto* const table = reinterpret_cast<void (*const*)()>(api);
#define DYNAMO_MOE_ORT_READ(name, place, ...) \
  (name) = reinterpret_cast<Function<__VA_ARGS__>>(table[place]);
    DYNAMO_MOE_ORT_ENTRIES(DYNAMO_MOE_ORT_READ)
    if (has_gpu_entries) {
      DYNAMO_MOE_ORT_GPU_ENTRIES(DYNAMO_MOE_ORT_READ)
    }
#undef DYNAMO_MOE_ORT_READ
  }

  template <typename Type>
  using Function = Type*;
#define DYNAMO_MOE_ORT_DECLARE(name, place, ...) Function<__VA_ARGS__> name = nullptr;
  DYNAMO_MOE_ORT_ENTRIES(DYNAMO_MOE_ORT_DECLARE)
  DYNAMO_MOE_ORT_GPU_ENTRIES(DYNAMO_MOE_ORT_DECLARE)
#undef DYNAMO_MOE_ORT_DECLARE

  bool HasGpuEntries() const { return KernelInfoGetAllocator != nullptr; }
};

}  // namespace dynamo_moe::onnxruntime
