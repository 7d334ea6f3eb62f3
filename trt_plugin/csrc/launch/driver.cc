#include "launch/driver.h"

#include <dlfcn.h>

#include <atomic>
#include <mutex>

namespace dynamo_moe::cuda {
namespace {

constexpr const char* kLibrary = "libcuda.so.1";

template <typename Function>
bool Resolve(void* library, const char* name, Function* function) {
  void* const symbol = dlsym(library, name);
  // POSIX requires that a data pointer can hold a function's address.
  *function = reinterpret_cast<Function>(symbol);
  return symbol != nullptr;
}

// Returns the first required function that the library lacks, or null.
const char* ResolveAll(void* library, Driver* driver) {
  const char* missing = nullptr;
  const auto require = [&](const char* name, auto* function) {
    if (!Resolve(library, name, function) && missing == nullptr) {
      missing = name;
    }
  };
  require("cuInit", &driver->init);
  require("cuDriverGetVersion", &driver->driver_get_version);
  require("cuGetErrorName", &driver->get_error_name);
  require("cuGetErrorString", &driver->get_error_string);
  require("cuCtxGetCurrent", &driver->context_get_current);
  require("cuCtxPushCurrent_v2", &driver->context_push);
  require("cuCtxPopCurrent_v2", &driver->context_pop);
  require("cuCtxGetDevice", &driver->context_get_device);
  require("cuStreamGetCtx", &driver->stream_get_context);
  require("cuDeviceGetAttribute", &driver->device_get_attribute);
  require("cuModuleLoadData", &driver->module_load_data);
  require("cuModuleUnload", &driver->module_unload);
  require("cuModuleGetFunction", &driver->module_get_function);
  require("cuFuncSetAttribute", &driver->function_set_attribute);
  require("cuLaunchKernelEx", &driver->launch);
  Resolve(library, "cuThreadExchangeStreamCaptureMode", &driver->exchange_capture_mode);
  Resolve(library, "cuFuncSetCacheConfig", &driver->function_set_cache_config);
  Resolve(library, "cuCtxGetId", &driver->context_get_id);
  Resolve(library, "cuTensorMapEncodeTiled", &driver->tensor_map_encode_tiled);
  return missing;
}

Status NoDriver(const std::string& why) {
  return {DYNAMO_MOE_NO_DRIVER,
          Text("the CUDA driver is not available: ", why,
               "; running kernels needs an NVIDIA GPU and its driver (525 or later)")};
}

Status Open(Driver* driver) {
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    return NoDriver(reason != nullptr ? reason : Text(kLibrary, " cannot be loaded"));
  }
  // Never closed: modules are unloaded through it until the process ends.
  if (const char* const missing = ResolveAll(library, driver)) {
    return NoDriver(Text(kLibrary, " is too old, it has no ", missing));
  }
  if (const Result result = driver->init(0); result != kSuccess) {
    return NoDriver(Failure(*driver, result, "cuInit").message());
  }
  return {};
}

}  // namespace

const Driver* Load(Status* status) {
  static std::mutex mutex;
  static Driver driver = {};
  static std::atomic<const Driver*> loaded{nullptr};
  if (const Driver* const ready = loaded.load(std::memory_order_acquire)) {
    return ready;
  }
  const std::scoped_lock lock(mutex);
  if (loaded.load(std::memory_order_relaxed) == nullptr) {
    // A failure is not kept: the driver may be there at the next call.
    if (*status = Open(&driver); !status->ok()) {
      return nullptr;
    }
    loaded.store(&driver, std::memory_order_release);
  }
  return &driver;
}

Status Failure(const Driver& driver, Result result, const std::string& what) {
  const char* name = nullptr;
  const char* text = nullptr;
  if (driver.get_error_name(result, &name) != kSuccess || name == nullptr) {
    name = "unknown error";
  }
  if (driver.get_error_string(result, &text) != kSuccess || text == nullptr) {
    text = "no description";
  }
  return {result == kOutOfMemory ? DYNAMO_MOE_OUT_OF_MEMORY : DYNAMO_MOE_CUDA_ERROR,
          Text(what, ": ", name, " (", text, ", code ", result, ")")};
}

ScopedContext::~ScopedContext() {
  if (pushed_) {
    Context popped = nullptr;
    driver_.context_pop(&popped);
  }
}

Result ScopedContext::Push(Context context) {
  const Result result = driver_.context_push(context);
  pushed_ = result == kSuccess;
  return result;
}

RelaxedCapture::RelaxedCapture(const Driver& driver) : driver_(driver) {
  changed_ =
      driver_.exchange_capture_mode != nullptr && driver_.exchange_capture_mode(&mode_) == kSuccess;
}

RelaxedCapture::~RelaxedCapture() {
  if (changed_) {
    driver_.exchange_capture_mode(&mode_);
  }
}

}  // namespace dynamo_moe::cuda
