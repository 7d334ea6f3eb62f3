#include "runtime.h"

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

struct OrtStatus {
  ort::ErrorCode code;
  std::string message;
};

struct OrtValue {
  ort::ElementType type = ort::kUndefined;
  std::vector<std::int64_t> sizes;
  void* data = nullptr;
};

struct OrtTensorTypeAndShapeInfo {
  ort::ElementType type;
  std::vector<std::int64_t> sizes;
};

struct OrtTypeInfo {
  OrtTensorTypeAndShapeInfo tensor;
};

struct OrtMemoryInfo {};
struct OrtLogger {};

struct OrtCustomOpDomain {
  std::string name;
  std::vector<const ort::CustomOp*> ops;
};

struct OrtSessionOptions {
  std::map<std::string, std::string> entries;
  std::vector<const OrtCustomOpDomain*> domains;
};

struct OrtKernelInfo {
  std::string name;
  std::vector<OrtValue> inputs;
  std::map<std::string, std::int64_t> integers;
  std::map<std::string, float> numbers;
  std::map<std::string, std::string> texts;
};

struct OrtKernelContext {
  std::vector<OrtValue> inputs;
  OrtValue y;
  void* stream;
};

namespace {

constexpr std::size_t kEntries = 512;
constexpr std::size_t kEntriesOf17 = 276;
// Around scratch memory, and how far from a multiple of 256 it begins.
constexpr std::size_t kGuard = 512;
constexpr std::size_t kShift = 8;
constexpr int kFill = 0xFF;

std::string version = "1.31.1";
std::atomic<std::int64_t> live{0};
std::atomic<std::int32_t> failing{0};
thread_local std::string failure;
thread_local ort::ErrorCode failure_code;
std::mutex mutex;
std::map<void*, std::size_t> scratches;
std::deque<std::string> messages;
OrtMemoryInfo device_memory;
OrtLogger session_logger;

[[noreturn]] void End(const char* why) {
  std::fprintf(stderr, "the library called ONNX Runtime wrongly: %s\n", why);
  std::abort();
}

void Missing() { End("an entry that the operators of the CUDA provider do not need"); }

template <typename Object>
Object* Made(Object&& object) {
  ++live;
  return new Object(std::forward<Object>(object));
}

template <typename Object>
void Release(Object* object) {
  if (object != nullptr) {
    --live;
    delete object;
  }
}

OrtStatus* Failed(const std::string& message, ort::ErrorCode code = ort::kFail) {
  return Made(OrtStatus{code, message});
}

template <typename Value>
OrtStatus* Find(const std::map<std::string, Value>& all, const char* name, Value* value) {
  const auto found = all.find(name);
  if (found == all.end()) {
    return Failed(std::string("No attribute with name:'") + name + "' is defined.");
  }
  *value = found->second;
  return nullptr;
}

// A text as the runtime gives it: its size with the end, and itself where there is room.
OrtStatus* Copy(const std::string& text, char* buffer, std::size_t* size) {
  const std::size_t needed = text.size() + 1;
  const bool enough = buffer == nullptr || *size >= needed;
  if (buffer != nullptr && enough) {
    std::memcpy(buffer, text.c_str(), needed);
  }
  *size = needed;
  return enough ? nullptr : Failed("Result buffer is not large enough");
}

OrtValue ValueOf(const Tensor& tensor) {
  OrtValue value;
  value.type = static_cast<ort::ElementType>(tensor.type);
  value.sizes.assign(tensor.sizes, tensor.sizes + (tensor.rank < 0 ? 0 : tensor.rank));
  value.data = tensor.data;
  return value;
}

std::vector<OrtValue> ValuesOf(const Tensor* tensors, std::size_t count) {
  std::vector<OrtValue> values;
  for (std::size_t i = 0; i < count; ++i) {
    values.push_back(ValueOf(tensors[i]));
  }
  return values;
}

char* Whole(void* scratch) { return static_cast<char*>(scratch) - kGuard - kShift; }

void* AllocateScratch(std::size_t bytes) {
  auto* const whole = static_cast<char*>(std::aligned_alloc(256, (bytes + 3 * kGuard) / 256 * 256));
  std::memset(whole, kFill, bytes + 2 * kGuard + kShift);
  void* const scratch = whole + kGuard + kShift;
  const std::scoped_lock lock(mutex);
  scratches[scratch] = bytes;
  ++live;
  return scratch;
}

void FreeScratch(ort::Allocator* /*self*/, void* memory) {
  std::size_t bytes = 0;
  {
    const std::scoped_lock lock(mutex);
    const auto found = scratches.find(memory);
    if (found == scratches.end()) {
      End("it frees what it was not given");
    }
    bytes = found->second;
    scratches.erase(found);
  }
  const auto* const begin = reinterpret_cast<const unsigned char*>(Whole(memory));
  for (std::size_t i = 0; i < kGuard + kShift; ++i) {
    if (begin[i] != kFill || (i < kGuard && begin[kGuard + kShift + bytes + i] != kFill)) {
      End("it writes outside of its scratch memory");
    }
  }
  std::free(Whole(memory));
  --live;
}

ort::Api MakeApi() {
  ort::Api api;
  api.CreateStatus = [](ort::ErrorCode code, const char* message) { return Failed(message, code); };
  api.GetErrorMessage = [](const OrtStatus* status) { return status->message.c_str(); };
  api.ReleaseStatus = [](OrtStatus* status) { Release(status); };
  // Domains stay with the library.
  api.CreateCustomOpDomain = [](const char* name, OrtCustomOpDomain** domain) -> OrtStatus* {
    *domain = new OrtCustomOpDomain{name, {}};
    return nullptr;
  };
  api.CustomOpDomain_Add = [](OrtCustomOpDomain* domain, const ort::CustomOp* op) -> OrtStatus* {
    domain->ops.push_back(op);
    return nullptr;
  };
  api.AddCustomOpDomain = [](OrtSessionOptions* options, OrtCustomOpDomain* domain) -> OrtStatus* {
    options->domains.push_back(domain);
    return nullptr;
  };
  api.HasSessionConfigEntry = [](const OrtSessionOptions* options, const char* key,
                                 int* found) -> OrtStatus* {
    *found = options->entries.count(key) != 0 ? 1 : 0;
    return nullptr;
  };
  api.GetSessionConfigEntry = [](const OrtSessionOptions* options, const char* key, char* text,
                                 std::size_t* size) {
    const auto found = options->entries.find(key);
    return found == options->entries.end() ? Failed("there is no such entry")
                                           : Copy(found->second, text, size);
  };
  api.KernelInfoGetAttribute_int64 = [](const OrtKernelInfo* info, const char* name,
                                        std::int64_t* value) {
    return Find(info->integers, name, value);
  };
  api.KernelInfoGetAttribute_float = [](const OrtKernelInfo* info, const char* name, float* value) {
    return Find(info->numbers, name, value);
  };
  api.KernelInfoGetAttribute_string = [](const OrtKernelInfo* info, const char* name, char* text,
                                         std::size_t* size) {
    std::string value;
    OrtStatus* const status = Find(info->texts, name, &value);
    return status != nullptr ? status : Copy(value, text, size);
  };
  api.KernelInfo_GetNodeName = [](const OrtKernelInfo* info, char* name, std::size_t* size) {
    return Copy(info->name, name, size);
  };
  api.KernelInfo_GetInputCount = [](const OrtKernelInfo* info, std::size_t* count) -> OrtStatus* {
    *count = info->inputs.size();
    return nullptr;
  };
  api.KernelInfo_GetInputTypeInfo = [](const OrtKernelInfo* info, std::size_t index,
                                       OrtTypeInfo** type) -> OrtStatus* {
    const OrtValue& input = info->inputs.at(index);
    if (input.type == ort::kUndefined) {
      return Failed("::OrtKernelInfo input does not have a type");
    }
    *type = Made(OrtTypeInfo{{input.type, input.sizes}});
    return nullptr;
  };
  api.CastTypeInfoToTensorInfo = [](const OrtTypeInfo* type,
                                    const OrtTensorTypeAndShapeInfo** tensor) -> OrtStatus* {
    *tensor = &type->tensor;
    return nullptr;
  };
  api.ReleaseTypeInfo = [](OrtTypeInfo* type) { Release(type); };
  api.GetTensorTypeAndShape = [](const OrtValue* value,
                                 OrtTensorTypeAndShapeInfo** info) -> OrtStatus* {
    *info = Made(OrtTensorTypeAndShapeInfo{value->type, value->sizes});
    return nullptr;
  };
  api.ReleaseTensorTypeAndShapeInfo = [](OrtTensorTypeAndShapeInfo* info) { Release(info); };
  api.GetTensorElementType = [](const OrtTensorTypeAndShapeInfo* info,
                                ort::ElementType* type) -> OrtStatus* {
    *type = info->type;
    return nullptr;
  };
  api.GetDimensionsCount = [](const OrtTensorTypeAndShapeInfo* info,
                              std::size_t* rank) -> OrtStatus* {
    *rank = info->sizes.size();
    return nullptr;
  };
  api.GetDimensions = [](const OrtTensorTypeAndShapeInfo* info, std::int64_t* sizes,
                         std::size_t rank) -> OrtStatus* {
    for (std::size_t axis = 0; axis < rank; ++axis) {
      sizes[axis] = info->sizes.at(axis);
    }
    return nullptr;
  };
  api.KernelInfoGetConstantInput_tensor = [](const OrtKernelInfo* info, std::size_t index,
                                             int* is_constant,
                                             const OrtValue** value) -> OrtStatus* {
    const OrtValue& input = info->inputs.at(index);
    *is_constant = input.data != nullptr ? 1 : 0;
    *value = input.data != nullptr ? &input : nullptr;
    return nullptr;
  };
  api.KernelInfo_GetLogger = [](const OrtKernelInfo*, const OrtLogger** logger) -> OrtStatus* {
    *logger = &session_logger;
    return nullptr;
  };
  api.Logger_LogMessage = [](const OrtLogger* logger, ort::LogLevel level, const char* message,
                             const char*, int, const char*) -> OrtStatus* {
    if (logger != &session_logger) {
      End("it logs to another logger than the session's");
    }
    const std::scoped_lock lock(mutex);
    messages.push_back(std::to_string(level) + " " + message);
    return nullptr;
  };
  api.KernelInfoGetAllocator = [](const OrtKernelInfo*, ort::MemoryType,
                                  ort::Allocator** allocator) -> OrtStatus* {
    *allocator = Made(ort::Allocator{
        ort::kGpuApiVersion,
        // Memory that is not ordered by a stream would pass to other streams too early.
        [](ort::Allocator*, std::size_t) -> void* { End("it allocates without a stream"); },
        FreeScratch,
        [](const ort::Allocator*) -> const OrtMemoryInfo* { return &device_memory; },
    });
    return nullptr;
  };
  api.ReleaseAllocator = [](ort::Allocator* allocator) { Release(allocator); };
  api.KernelContext_GetScratchBuffer = [](const OrtKernelContext*, const OrtMemoryInfo* memory,
                                          std::size_t bytes, void** buffer) -> OrtStatus* {
    if (memory != &device_memory) {
      End("it asks for scratch memory of another device");
    }
    const std::int32_t how = failing.exchange(0);
    if (how == 1) {
      return Failed("Available memory of 0 is smaller than requested bytes");
    }
    *buffer = how == 2 || bytes == 0 ? nullptr : AllocateScratch(bytes);
    return nullptr;
  };
  api.KernelContext_GetInput = [](const OrtKernelContext* context, std::size_t index,
                                  const OrtValue** value) -> OrtStatus* {
    const OrtValue& input = context->inputs.at(index);
    *value = input.type == ort::kUndefined ? nullptr : &input;
    return nullptr;
  };
  api.KernelContext_GetOutput = [](OrtKernelContext* context, std::size_t index,
                                   const std::int64_t* sizes, std::size_t rank,
                                   OrtValue** value) -> OrtStatus* {
    if (index != 0 || std::vector<std::int64_t>(sizes, sizes + rank) != context->inputs[0].sizes) {
      End("y has not the sizes of x");
    }
    *value = &context->y;
    return nullptr;
  };
  api.GetTensorMutableData = [](OrtValue* value, void** data) -> OrtStatus* {
    *data = value->data;
    return nullptr;
  };
  api.KernelContext_GetGPUComputeStream = [](const OrtKernelContext* context,
                                             void** stream) -> OrtStatus* {
    *stream = context->stream;
    return nullptr;
  };
  return api;
}

// The table, in which an old runtime ends early.
const OrtApi* TableOf(bool has_gpu_entries) {
  static const auto* const tables = [] {
    auto* const made =
        new std::vector<std::vector<void (*)()>>(2, std::vector<void (*)()>(kEntries, &Missing));
    const ort::Api api = MakeApi();
#define PUT(name, place, ...)                                \
  for (std::vector<void (*)()>& table : *made) {             \
    if (api.name != nullptr) {                               \
      table[place] = reinterpret_cast<void (*)()>(api.name); \
    }                                                        \
  }
    DYNAMO_MOE_ORT_ENTRIES(PUT)
    DYNAMO_MOE_ORT_GPU_ENTRIES(PUT)
#undef PUT
    (*made)[0].resize(kEntriesOf17);
    return made;
  }();
  return reinterpret_cast<const OrtApi*>((*tables)[has_gpu_entries ? 1 : 0].data());
}

std::uint32_t Minor() { return static_cast<std::uint32_t>(std::atoi(version.c_str() + 2)); }

const OrtApi* GetApi(std::uint32_t wanted) {
  if (wanted > Minor()) {
    // The runtime writes it to stderr.
    const std::scoped_lock lock(mutex);
    messages.push_back("the requested version of the interface is not available");
    return nullptr;
  }
  return TableOf(Minor() >= ort::kGpuApiVersion);
}

const char* Taken(OrtStatus* status) {
  if (status == nullptr) {
    return nullptr;
  }
  failure = status->message;
  failure_code = status->code;
  Release(status);
  return failure.c_str();
}

}  // namespace

std::int32_t ort_failure_code() { return failure_code; }

void ort_set_version(const char* wanted) { version = wanted; }

OrtSessionOptions* ort_options_new() { return new OrtSessionOptions; }

void ort_options_free(OrtSessionOptions* options) { delete options; }

void ort_options_entry(OrtSessionOptions* options, const char* key, const char* value) {
  options->entries[key] = value;
}

const char* ort_register(OrtSessionOptions* options, RegisterFunction function) {
  const ort::ApiBase base = {&GetApi, []() -> const char* { return version.c_str(); }};
  return Taken(function(options, &base));
}

const ort::CustomOp* ort_operator(const OrtSessionOptions* options, const char* domain,
                                  const char* name, const char* provider, std::int32_t type) {
  for (const OrtCustomOpDomain* const each : options->domains) {
    for (const ort::CustomOp* const op : each->ops) {
      if (each->name == domain && std::strcmp(op->get_name(op), name) == 0 &&
          std::strcmp(op->get_provider(op), provider) == 0 && op->get_input_type(op, 0) == type) {
        return op;
      }
    }
  }
  return nullptr;
}

OrtKernelInfo* ort_node_new(const char* name, const Tensor* inputs, std::size_t count) {
  return new OrtKernelInfo{name, ValuesOf(inputs, count), {}, {}, {}};
}

void ort_node_free(OrtKernelInfo* node) { delete node; }

void ort_node_integer(OrtKernelInfo* node, const char* name, std::int64_t value) {
  node->integers[name] = value;
}

void ort_node_number(OrtKernelInfo* node, const char* name, float value) {
  node->numbers[name] = value;
}

void ort_node_text(OrtKernelInfo* node, const char* name, const char* value) {
  node->texts[name] = value;
}

const char* ort_kernel_new(const ort::CustomOp* op, const OrtKernelInfo* node, void** kernel) {
  for (std::size_t i = 0; i < op->get_input_count(op); ++i) {
    if (op->get_input_memory(op, i) != ort::kDefaultMemory) {
      End("an input is not on the device");
    }
  }
  return Taken(op->create_kernel_v2(op, nullptr, node, kernel));
}

void ort_kernel_free(const ort::CustomOp* op, void* kernel) { op->destroy_kernel(kernel); }

const char* ort_call(const ort::CustomOp* op, void* kernel, const Tensor* inputs, std::size_t count,
                     void* y, void* stream) {
  OrtKernelContext context = {ValuesOf(inputs, count), {}, stream};
  context.y = context.inputs.at(0);
  context.y.data = y;
  return Taken(op->compute_v2(kernel, &context));
}

void ort_fail_scratch(std::int32_t how) { failing = how; }

std::int64_t ort_live() { return live; }

const char* ort_message() {
  thread_local std::string taken;
  const std::scoped_lock lock(mutex);
  if (messages.empty()) {
    return nullptr;
  }
  taken = messages.front();
  messages.pop_front();
  return taken.c_str();
}
