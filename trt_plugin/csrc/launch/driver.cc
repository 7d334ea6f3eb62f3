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

// Finds required functions, and remembers the first that the library lacks.
class Required {
 public:
  explicit Required(void* library) : library_(library) {}

  template <typename Function>
  void operator()(const char* name, Function* function) {
    if (!Resolve(library_, name, function) && missing_ == nullptr) {
      missing_ = name;
    }
  }

  const char* missing() const { return missing_; }

 private:
  void* library_;
  const char* missing_ = nullptr;
};

// Returns the first required function that the library lacks, or null.
const char* ResolveAll(void* library, Driver* driver) {
  Required require(library);
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
  return require.missing();
}

const char* ResolveAll(void* library, OffloadDriver* driver) {
  Required require(library);
  require("cuMemAlloc_v2", &driver->memory_allocate);
  require("cuMemFree_v2", &driver->memory_free);
  require("cuMemsetD8Async", &driver->memory_set);
  require("cuMemHostRegister_v2", &driver->host_register);
  require("cuMemHostUnregister", &driver->host_unregister);
  require("cuMemHostAlloc", &driver->host_allocate);
  require("cuMemFreeHost", &driver->host_free);
  require("cuMemHostGetDevicePointer_v2", &driver->host_get_address);
  require("cuCtxGetStreamPriorityRange", &driver->context_get_priorities);
  require("cuStreamCreateWithPriority", &driver->stream_create);
  require("cuStreamDestroy_v2", &driver->stream_destroy);
  require("cuStreamSynchronize", &driver->stream_synchronize);
  require("cuStreamIsCapturing", &driver->stream_is_capturing);
  require("cuStreamWaitEvent", &driver->stream_wait_event);
  require("cuEventCreate", &driver->event_create);
  require("cuEventRecord", &driver->event_record);
  require("cuEventDestroy_v2", &driver->event_destroy);
  return require.missing();
}

Status NoDriver(const std::string& why) {
  return {DYNAMO_MOE_NO_DRIVER,
          Text("the CUDA driver is not available: ", why,
               "; running kernels needs an NVIDIA GPU and its driver (525 or later, 580 for "
               "sm_100 and later)")};
}

// Finds a driver's functions in its library.
template <typename Functions>
Status Find(Functions* driver) {
  // Never closed: modules are unloaded through it until the process ends.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const reason = dlerror();
    return NoDriver(reason != nullptr ? reason : Text(kLibrary, " cannot be loaded"));
  }
  const char* const missing = ResolveAll(library, driver);
  return missing == nullptr ? Status()
                            : NoDriver(Text(kLibrary, " is too old, it has no ", missing));
}

Status Open(Driver* driver) {
  DYNAMO_MOE_RETURN_IF_ERROR(Find(driver));
  const Result result = driver->init(0);
  return result == kSuccess ? Status() : NoDriver(Failure(*driver, result, "cuInit").message());
}

Status Open(OffloadDriver* driver) {
  Status status;
  return Load(&status) != nullptr ? Find(driver) : status;
}

// A driver's functions, opened by the first call that succeeds.
template <typename Functions>
const Functions* LoadOnce(Status* status) {
  static std::mutex mutex;
  static Functions driver = {};
  static std::atomic<const Functions*> loaded{nullptr};
  if (const Functions* const ready = loaded.load(std::memory_order_acquire)) {
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

}  // namespace

const Driver* Load(Status* status) { return LoadOnce<Driver>(status); }

const OffloadDriver* LoadOffload(Status* status) { return LoadOnce<OffloadDriver>(status); }

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
