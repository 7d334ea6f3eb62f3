// A stand-in for libcuda.so.1: devices without a GPU, for tests of the launcher.
//
// It has the driver's functions that the launcher calls, and refuses what a driver would refuse. A
// launch is handed to a callback, which reads the parameters and computes; without one it is only
// counted. standin_* functions set it up. With STANDIN_CUDA_11 it lacks what came with CUDA 12,
// with STANDIN_CUDA_10 what came with CUDA 11.8 too.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <set>
#include <string>
#include <utility>
#include <vector>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

enum Result {
  kSuccess = 0,
  kInvalidValue = 1,
  kOutOfMemory = 2,
  kInvalidImage = 200,
  kInvalidContext = 201,
  kInvalidHandle = 400,
  kNotFound = 500,
  kAlreadyRegistered = 712,
  kNotRegistered = 713,
  kNotSupported = 801,
  kStreamCaptureUnsupported = 900,
  kStreamCaptureIsolation = 905,
  kCapturedEvent = 907,
};

constexpr int kRelaxedCapture = 2;

constexpr int kVersion = 13000;

constexpr int kHighestPriority = -5;

struct Device {
  int architecture;
  int shared_memory_optin;
};

struct Context {
  int device;
  unsigned long long id;
};

struct Stream {
  Context* context;
  // Which capture it is part of; 0: none.
  int capture;
  // A test made it, not the launcher.
  bool is_ours;
};

struct Event {
  Context* context;
  bool is_recorded;
  // In which capture it was recorded last; 0: in none.
  int capture;
};

// Pinned host memory.
struct Pinned {
  Context* context;
  std::size_t size;
  bool is_registered;
};

struct Module {
  Context* context;
  int image;
};

struct Function {
  Module* module;
  std::string name;
  int max_dynamic_shared_memory;
};

// What a launch's callback is told.
struct Launch {
  const char* function;
  void** parameters;
  void* stream;
  void* context;
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t shared_memory;
  std::int32_t image;
  std::int32_t dependent;
};
using Callback = int (*)(const Launch*);

// What a stream is asked for besides launches.
struct Operation {
  enum Kind : std::int32_t { kRecord, kWait, kSet, kSynchronize, kSynchronizeAll };

  std::int32_t kind;
  std::int32_t value;
  void* stream;
  void* event;
  void* address;
  std::uint64_t size;
};
using OperationCallback = void (*)(const Operation*);

struct Failure {
  int calls_before;
  int result;
};

struct State {
  std::mutex mutex;
  std::vector<Device> devices;
  std::vector<std::string> images;
  std::set<Context*> contexts;
  std::set<Stream*> streams;
  std::set<Event*> events;
  std::map<std::uint64_t, Context*> memory;
  std::map<std::uint64_t, Pinned> pinned;
  std::set<Module*> modules;
  std::map<Module*, std::vector<Function*>> functions;
  std::map<std::string, Failure> failures;
  std::map<std::string, int> calls;
  unsigned long long next_context = 1;
  int version = kVersion;
  bool registers_read_only = true;
  // Another thread captures a stream, in the mode that no thread may disturb.
  bool capturing = false;
  // Captures so far, and those that have not ended.
  int captures = 0;
  std::set<int> active_captures;
  Callback callback = nullptr;
  OperationCallback operation = nullptr;
};

State& state() {
  static State& instance = *new State;
  return instance;
}

thread_local std::vector<Context*> current;
// 0 is global.
thread_local int capture_mode = 0;

Context* CurrentContext() { return current.empty() ? nullptr : current.back(); }

// Counts a call; returns what it must fail with, or kSuccess.
int Called(const char* name) {
  State& s = state();
  ++s.calls[name];
  const auto planned = s.failures.find(name);
  if (planned == s.failures.end() || planned->second.calls_before-- > 0) {
    return kSuccess;
  }
  const int result = planned->second.result;
  s.failures.erase(planned);
  return result;
}

// Whether loading and unloading would break a capture.
bool DisturbsCapture() { return state().capturing && capture_mode != kRelaxedCapture; }

// Which known image lies at an address; -1 if none. Compares no byte after the first that differs.
int ImageAt(const char* address) {
  const std::vector<std::string>& images = state().images;
  for (std::size_t i = 0; i < images.size(); ++i) {
    std::size_t same = 0;
    while (same < images[i].size() && address[same] == images[i][same]) {
      ++same;
    }
    if (same == images[i].size()) {
      return static_cast<int>(i);
    }
  }
  return -1;
}

bool IsLive(const Function* function) {
  const auto found = state().functions.find(function->module);
  return found != state().functions.end();
}

// Destroys what a context has.
void Empty(const Context* context) {
  State& s = state();
  for (auto each = s.modules.begin(); each != s.modules.end();) {
    if ((*each)->context != context) {
      ++each;
      continue;
    }
    for (const Function* const function : s.functions[*each]) {
      delete function;
    }
    s.functions.erase(*each);
    delete *each;
    each = s.modules.erase(each);
  }
  for (auto each = s.streams.begin(); each != s.streams.end();) {
    if ((*each)->context == context) {
      delete *each;
      each = s.streams.erase(each);
    } else {
      ++each;
    }
  }
  for (auto each = s.events.begin(); each != s.events.end();) {
    if ((*each)->context == context) {
      delete *each;
      each = s.events.erase(each);
    } else {
      ++each;
    }
  }
  for (auto each = s.memory.begin(); each != s.memory.end();) {
    if (each->second == context) {
      std::free(reinterpret_cast<void*>(each->first));
      each = s.memory.erase(each);
    } else {
      ++each;
    }
  }
  for (auto each = s.pinned.begin(); each != s.pinned.end();) {
    if (each->second.context == context) {
      if (!each->second.is_registered) {
        std::free(reinterpret_cast<void*>(each->first));
      }
      each = s.pinned.erase(each);
    } else {
      ++each;
    }
  }
}

// Null is the default stream, which nothing captures.
int CaptureOf(const Stream* stream) { return stream == nullptr ? 0 : stream->capture; }

bool IsStream(Stream* stream) { return stream == nullptr || state().streams.count(stream) != 0; }

// Reports an operation; returns whether a test wants to do it itself.
bool Report(const Operation& operation) {
  OperationCallback callback = nullptr;
  {
    const std::lock_guard<std::mutex> lock(state().mutex);
    callback = state().operation;
  }
  if (callback != nullptr) {
    callback(&operation);
  }
  return callback != nullptr;
}

// Memory whose content nothing may rely on.
void* Garbage(std::size_t size) {
  const std::size_t whole = (size + 255) / 256 * 256;
  void* const memory = std::aligned_alloc(256, whole);
  if (memory != nullptr) {
    std::memset(memory, 0xFF, whole);
  }
  return memory;
}

}  // namespace

#define BEGIN(name)                                            \
  const std::lock_guard<std::mutex> lock(state().mutex);       \
  if (const int planned = Called(name); planned != kSuccess) { \
    return planned;                                            \
  }

// --- Set-up ---

EXPORT void standin_reset() {
  State& s = state();
  const std::lock_guard<std::mutex> lock(s.mutex);
  s.devices.clear();
  s.images.clear();
  s.failures.clear();
  s.calls.clear();
  s.version = kVersion;
  s.registers_read_only = true;
  s.capturing = false;
  s.active_captures.clear();
  s.callback = nullptr;
  s.operation = nullptr;
}

// 12080 for a driver of CUDA 12.8.
EXPORT void standin_set_version(int version) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().version = version;
}

// Whether devices can pin pages of the host that they only read.
EXPORT void standin_set_registers_read_only(bool registers) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().registers_read_only = registers;
}

EXPORT int standin_add_device(int architecture, int shared_memory_optin) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().devices.push_back({architecture, shared_memory_optin});
  return static_cast<int>(state().devices.size()) - 1;
}

EXPORT int standin_add_image(const char* bytes, std::size_t size) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().images.emplace_back(bytes, size);
  return static_cast<int>(state().images.size()) - 1;
}

EXPORT void* standin_create_context(int device) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* const context = new Context{device, state().next_context++};
  state().contexts.insert(context);
  return context;
}

// Makes another context of the same handle, as cuDevicePrimaryCtxReset does; destroys what it had.
EXPORT void standin_reset_context(void* handle) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* const context = static_cast<Context*>(handle);
  Empty(context);
  context->id = state().next_context++;
}

// Destroys a context and what it has, as cuCtxDestroy does.
EXPORT void standin_destroy_context(void* handle) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  auto* const context = static_cast<Context*>(handle);
  Empty(context);
  state().contexts.erase(context);
  delete context;
}

// Destroyed with its context.
EXPORT void* standin_create_stream(void* context) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return *state().streams.insert(new Stream{static_cast<Context*>(context), 0, true}).first;
}

EXPORT void standin_set_context(void* context) {
  current.clear();
  if (context != nullptr) {
    current.push_back(static_cast<Context*>(context));
  }
}

EXPORT void standin_set_capturing(bool capturing) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().capturing = capturing;
}

// Captures a stream, and those that wait for its events.
EXPORT int standin_begin_capture(Stream* stream) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  stream->capture = ++state().captures;
  state().active_captures.insert(stream->capture);
  return stream->capture;
}

EXPORT void standin_end_capture(int capture) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  for (Stream* const stream : state().streams) {
    if (stream->capture == capture) {
      stream->capture = 0;
    }
  }
  state().active_captures.erase(capture);
}

EXPORT int standin_capture_mode() { return capture_mode; }

EXPORT void standin_on_launch(Callback callback) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().callback = callback;
}

// Told what streams are asked for besides launches, and then the one who does it.
EXPORT void standin_on_operation(OperationCallback callback) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().operation = callback;
}

// Makes one later call of a function fail, after a number of calls that succeed.
EXPORT void standin_fail(const char* function, int calls_before, int result) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  state().failures[function] = {calls_before, result};
}

EXPORT int standin_calls(const char* function) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return state().calls[function];
}

EXPORT int standin_live_modules() {
  const std::lock_guard<std::mutex> lock(state().mutex);
  return static_cast<int>(state().modules.size());
}

// What the launcher has of a kind.
EXPORT int standin_live(const char* name) {
  const std::lock_guard<std::mutex> lock(state().mutex);
  const State& s = state();
  const std::string kind = name;
  std::size_t count = 0;
  if (kind == "streams") {
    for (const Stream* const each : s.streams) {
      count += each->is_ours ? 0 : 1;
    }
  } else if (kind == "registrations" || kind == "pinned memory") {
    for (const auto& each : s.pinned) {
      count += each.second.is_registered == (kind == "registrations") ? 1 : 0;
    }
  } else {
    count = kind == "events" ? s.events.size() : s.memory.size();
  }
  return static_cast<int>(count);
}

// --- The driver ---

EXPORT int cuInit(unsigned flags) {
  BEGIN("cuInit");
  return flags == 0 ? kSuccess : kInvalidValue;
}

EXPORT int cuDriverGetVersion(int* version) {
  BEGIN("cuDriverGetVersion");
  *version = state().version;
  return kSuccess;
}

EXPORT int cuGetErrorName(int error, const char** name) {
  switch (error) {
    case 2:
      *name = "CUDA_ERROR_OUT_OF_MEMORY";
      return kSuccess;
    case kInvalidValue:
      *name = "CUDA_ERROR_INVALID_VALUE";
      return kSuccess;
    case 719:
      *name = "CUDA_ERROR_LAUNCH_FAILED";
      return kSuccess;
    default:
      *name = "CUDA_ERROR_OTHER";
      return kSuccess;
  }
}

EXPORT int cuGetErrorString(int error, const char** text) {
  *text = error == 2 ? "out of memory" : "described by the stand-in";
  return kSuccess;
}

EXPORT int cuCtxGetCurrent(Context** context) {
  BEGIN("cuCtxGetCurrent");
  *context = CurrentContext();
  return kSuccess;
}

#if !defined(STANDIN_CUDA_11) && !defined(STANDIN_CUDA_10)
EXPORT int cuCtxGetId(Context* context, unsigned long long* id) {
  BEGIN("cuCtxGetId");
  if (state().contexts.count(context) == 0) {
    return kInvalidContext;
  }
  *id = context->id;
  return kSuccess;
}
#endif

EXPORT int cuCtxPushCurrent_v2(Context* context) {
  BEGIN("cuCtxPushCurrent");
  if (state().contexts.count(context) == 0) {
    return kInvalidContext;
  }
  current.push_back(context);
  return kSuccess;
}

EXPORT int cuCtxPopCurrent_v2(Context** context) {
  BEGIN("cuCtxPopCurrent");
  if (current.empty()) {
    return kInvalidContext;
  }
  *context = current.back();
  current.pop_back();
  return kSuccess;
}

EXPORT int cuCtxGetDevice(int* device) {
  BEGIN("cuCtxGetDevice");
  if (CurrentContext() == nullptr) {
    return kInvalidContext;
  }
  *device = CurrentContext()->device;
  return kSuccess;
}

EXPORT int cuStreamGetCtx(Stream* stream, Context** context) {
  BEGIN("cuStreamGetCtx");
  if (state().streams.count(stream) == 0) {
    return kInvalidHandle;
  }
  *context = stream->context;
  return kSuccess;
}

EXPORT int cuDeviceGetCount(int* count) {
  BEGIN("cuDeviceGetCount");
  *count = static_cast<int>(state().devices.size());
  return kSuccess;
}

EXPORT int cuDeviceGet(int* device, int ordinal) {
  BEGIN("cuDeviceGet");
  if (ordinal < 0 || ordinal >= static_cast<int>(state().devices.size())) {
    return kInvalidValue;
  }
  *device = ordinal;
  return kSuccess;
}

EXPORT int cuDevicePrimaryCtxRetain(Context** context, int device) {
  if (device < 0 || device >= static_cast<int>(state().devices.size())) {
    return kInvalidValue;
  }
  *context = static_cast<Context*>(standin_create_context(device));
  return kSuccess;
}

EXPORT int cuCtxSetCurrent(Context* context) {
  standin_set_context(context);
  return kSuccess;
}

// A launch has ended when its call returns.
EXPORT int cuCtxSynchronize() { return CurrentContext() == nullptr ? kInvalidContext : kSuccess; }

// Device memory is the host's.
EXPORT int cuMemAlloc_v2(std::uint64_t* address, std::size_t size) {
  BEGIN("cuMemAlloc");
  if (DisturbsCapture()) {
    return kStreamCaptureUnsupported;
  }
  void* const memory = Garbage(size);
  if (memory == nullptr || size == 0) {
    return size == 0 ? kInvalidValue : kOutOfMemory;
  }
  *address = reinterpret_cast<std::uint64_t>(memory);
  state().memory[*address] = CurrentContext();
  return kSuccess;
}

EXPORT int cuMemFree_v2(std::uint64_t address) {
  {
    BEGIN("cuMemFree");
    if (DisturbsCapture()) {
      return kStreamCaptureUnsupported;
    }
    if (state().memory.erase(address) == 0) {
      return kInvalidValue;
    }
  }
  Report({Operation::kSynchronizeAll, 0, nullptr, nullptr, nullptr, 0});
  std::free(reinterpret_cast<void*>(address));
  return kSuccess;
}

EXPORT int cuMemHostRegister_v2(void* memory, std::size_t size, unsigned flags) {
  BEGIN("cuMemHostRegister");
  constexpr std::uint64_t kPage = 4096;
  constexpr unsigned kMappedReadOnly = 10;
  const auto address = reinterpret_cast<std::uint64_t>(memory);
  if (DisturbsCapture()) {
    return kStreamCaptureUnsupported;
  }
  if (!state().registers_read_only) {
    return kNotSupported;
  }
  if (CurrentContext() == nullptr) {
    return kInvalidContext;
  }
  if (address % kPage != 0 || size % kPage != 0 || size == 0 || flags != kMappedReadOnly) {
    return kInvalidValue;
  }
  for (const auto& [begin, other] : state().pinned) {
    if (begin < address + size && address < begin + other.size) {
      return kAlreadyRegistered;
    }
  }
  state().pinned[address] = {CurrentContext(), size, true};
  return kSuccess;
}

EXPORT int cuMemHostUnregister(void* memory) {
  BEGIN("cuMemHostUnregister");
  const auto found = state().pinned.find(reinterpret_cast<std::uint64_t>(memory));
  if (found == state().pinned.end() || !found->second.is_registered) {
    return kNotRegistered;
  }
  if (found->second.context != CurrentContext()) {
    return kInvalidContext;
  }
  state().pinned.erase(found);
  return kSuccess;
}

EXPORT int cuMemHostAlloc(void** memory, std::size_t size, unsigned flags) {
  BEGIN("cuMemHostAlloc");
  constexpr unsigned kMapped = 2;
  if (DisturbsCapture()) {
    return kStreamCaptureUnsupported;
  }
  if (size == 0 || flags != kMapped) {
    return kInvalidValue;
  }
  *memory = Garbage(size);
  if (*memory == nullptr) {
    return kOutOfMemory;
  }
  state().pinned[reinterpret_cast<std::uint64_t>(*memory)] = {CurrentContext(), size, false};
  return kSuccess;
}

EXPORT int cuMemFreeHost(void* memory) {
  BEGIN("cuMemFreeHost");
  const auto found = state().pinned.find(reinterpret_cast<std::uint64_t>(memory));
  if (found == state().pinned.end() || found->second.is_registered) {
    return kInvalidValue;
  }
  std::free(memory);
  state().pinned.erase(found);
  return kSuccess;
}

EXPORT int cuMemHostGetDevicePointer_v2(std::uint64_t* address, void* memory, unsigned flags) {
  BEGIN("cuMemHostGetDevicePointer");
  *address = reinterpret_cast<std::uint64_t>(memory);
  return flags == 0 && state().pinned.count(*address) != 0 ? kSuccess : kInvalidValue;
}

EXPORT int cuMemsetD8Async(std::uint64_t address, unsigned char value, std::size_t size,
                           Stream* stream) {
  {
    BEGIN("cuMemsetD8Async");
    if (!IsStream(stream)) {
      return kInvalidHandle;
    }
  }
  void* const memory = reinterpret_cast<void*>(address);
  if (!Report({Operation::kSet, value, stream, nullptr, memory, size})) {
    std::memset(memory, value, size);
  }
  return kSuccess;
}

EXPORT int cuCtxGetStreamPriorityRange(int* least, int* greatest) {
  BEGIN("cuCtxGetStreamPriorityRange");
  *least = 0;
  *greatest = kHighestPriority;
  return kSuccess;
}

EXPORT int cuStreamCreateWithPriority(Stream** stream, unsigned flags, int priority) {
  BEGIN("cuStreamCreateWithPriority");
  constexpr unsigned kNonBlocking = 1;
  if (CurrentContext() == nullptr || flags != kNonBlocking || priority != kHighestPriority) {
    return CurrentContext() == nullptr ? kInvalidContext : kInvalidValue;
  }
  *stream = *state().streams.insert(new Stream{CurrentContext(), 0, false}).first;
  return kSuccess;
}

EXPORT int cuStreamDestroy_v2(Stream* stream) {
  BEGIN("cuStreamDestroy");
  if (state().streams.erase(stream) == 0) {
    return kInvalidHandle;
  }
  delete stream;
  return kSuccess;
}

EXPORT int cuStreamSynchronize(Stream* stream) {
  {
    BEGIN("cuStreamSynchronize");
    if (!IsStream(stream)) {
      return kInvalidHandle;
    }
    if (CaptureOf(stream) != 0) {
      return kStreamCaptureUnsupported;
    }
  }
  Report({Operation::kSynchronize, 0, stream, nullptr, nullptr, 0});
  return kSuccess;
}

EXPORT int cuStreamIsCapturing(Stream* stream, int* status) {
  BEGIN("cuStreamIsCapturing");
  if (!IsStream(stream)) {
    return kInvalidHandle;
  }
  *status = CaptureOf(stream) == 0 ? 0 : 1;
  return kSuccess;
}

EXPORT int cuStreamWaitEvent(Stream* stream, Event* event, unsigned flags) {
  {
    BEGIN("cuStreamWaitEvent");
    State& s = state();
    if (!IsStream(stream) || s.events.count(event) == 0) {
      return kInvalidHandle;
    }
    if (flags != 0) {
      return kInvalidValue;
    }
    if (!event->is_recorded) {
      return kSuccess;
    }
    if (CaptureOf(stream) != 0 && event->capture != CaptureOf(stream)) {
      return kStreamCaptureIsolation;
    }
    if (event->capture != 0) {
      if (stream == nullptr || s.active_captures.count(event->capture) == 0) {
        return kCapturedEvent;
      }
      stream->capture = event->capture;
    }
  }
  Report({Operation::kWait, 0, stream, event, nullptr, 0});
  return kSuccess;
}

EXPORT int cuEventCreate(Event** event, unsigned flags) {
  BEGIN("cuEventCreate");
  constexpr unsigned kDisableTiming = 2;
  if (CurrentContext() == nullptr || flags != kDisableTiming) {
    return CurrentContext() == nullptr ? kInvalidContext : kInvalidValue;
  }
  *event = *state().events.insert(new Event{CurrentContext(), false, 0}).first;
  return kSuccess;
}

EXPORT int cuEventRecord(Event* event, Stream* stream) {
  {
    BEGIN("cuEventRecord");
    if (!IsStream(stream) || state().events.count(event) == 0) {
      return kInvalidHandle;
    }
    event->is_recorded = true;
    event->capture = CaptureOf(stream);
  }
  Report({Operation::kRecord, 0, stream, event, nullptr, 0});
  return kSuccess;
}

EXPORT int cuEventDestroy_v2(Event* event) {
  BEGIN("cuEventDestroy");
  if (state().events.erase(event) == 0) {
    return kInvalidHandle;
  }
  delete event;
  return kSuccess;
}

EXPORT int cuMemsetD8_v2(std::uint64_t address, unsigned char value, std::size_t size) {
  std::memset(reinterpret_cast<void*>(address), value, size);
  return kSuccess;
}

EXPORT int cuMemcpyHtoD_v2(std::uint64_t to, const void* from, std::size_t size) {
  std::memcpy(reinterpret_cast<void*>(to), from, size);
  return kSuccess;
}

EXPORT int cuMemcpyDtoH_v2(void* to, std::uint64_t from, std::size_t size) {
  std::memcpy(to, reinterpret_cast<void*>(from), size);
  return kSuccess;
}

EXPORT int cuDeviceGetAttribute(int* value, int attribute, int device) {
  BEGIN("cuDeviceGetAttribute");
  if (device < 0 || device >= static_cast<int>(state().devices.size())) {
    return kInvalidValue;
  }
  const Device& found = state().devices[device];
  switch (attribute) {
    case 75:
      *value = found.architecture / 10;
      return kSuccess;
    case 76:
      *value = found.architecture % 10;
      return kSuccess;
    case 97:
      *value = found.shared_memory_optin;
      return kSuccess;
    case 113:
      *value = state().registers_read_only ? 1 : 0;
      return kSuccess;
    default:
      return kInvalidValue;
  }
}

EXPORT int cuModuleLoadData(Module** module, const void* image) {
  BEGIN("cuModuleLoadData");
  if (DisturbsCapture()) {
    return kStreamCaptureUnsupported;
  }
  if (CurrentContext() == nullptr) {
    return kInvalidContext;
  }
  const int known = ImageAt(static_cast<const char*>(image));
  if (known < 0) {
    return kInvalidImage;
  }
  *module = new Module{CurrentContext(), known};
  state().modules.insert(*module);
  state().functions[*module] = {};
  return kSuccess;
}

EXPORT int cuModuleUnload(Module* module) {
  BEGIN("cuModuleUnload");
  if (DisturbsCapture()) {
    return kStreamCaptureUnsupported;
  }
  State& s = state();
  if (s.modules.count(module) == 0) {
    return kInvalidHandle;
  }
  if (module->context != CurrentContext()) {
    return kInvalidContext;
  }
  for (const Function* const function : s.functions[module]) {
    delete function;
  }
  s.functions.erase(module);
  s.modules.erase(module);
  delete module;
  return kSuccess;
}

EXPORT int cuModuleGetFunction(Function** function, Module* module, const char* name) {
  BEGIN("cuModuleGetFunction");
  if (state().modules.count(module) == 0) {
    return kInvalidHandle;
  }
  *function = new Function{module, name, 48 * 1024};
  state().functions[module].push_back(*function);
  return kSuccess;
}

EXPORT int cuFuncSetAttribute(Function* function, int attribute, int value) {
  BEGIN("cuFuncSetAttribute");
  if (function == nullptr || !IsLive(function)) {
    return kInvalidHandle;
  }
  const Device& device = state().devices[function->module->context->device];
  if (attribute != 8 || value < 0 || value > device.shared_memory_optin) {
    return kInvalidValue;
  }
  function->max_dynamic_shared_memory = value;
  return kSuccess;
}

#ifndef STANDIN_CUDA_10
EXPORT int cuThreadExchangeStreamCaptureMode(int* mode) {
  BEGIN("cuThreadExchangeStreamCaptureMode");
  std::swap(capture_mode, *mode);
  return kSuccess;
}

EXPORT int cuFuncSetCacheConfig(Function* function, int config) {
  BEGIN("cuFuncSetCacheConfig");
  return function != nullptr && IsLive(function) && config == 1 ? kSuccess : kInvalidValue;
}

struct Attribute {
  int id;
  int padding;
  union {
    char bytes[64];
    int value;
  };
};

struct Config {
  std::uint32_t grid[3];
  std::uint32_t block[3];
  std::uint32_t shared_memory;
  void* stream;
  const Attribute* attributes;
  std::uint32_t attribute_count;
};

EXPORT int cuLaunchKernelEx(const Config* config, Function* function, void** parameters,
                            void** extra) {
  Callback callback = nullptr;
  Launch launch = {};
  {
    BEGIN("cuLaunchKernelEx");
    if (function == nullptr || extra != nullptr || !IsLive(function)) {
      return kInvalidHandle;
    }
    if (function->module->context != CurrentContext()) {
      return kInvalidContext;
    }
    const std::uint32_t threads = config->block[0] * config->block[1] * config->block[2];
    const bool fits = config->grid[0] >= 1 && config->grid[0] <= 0x7FFFFFFFU &&
                      config->grid[1] >= 1 && config->grid[1] <= 65535 && config->grid[2] >= 1 &&
                      config->grid[2] <= 65535 && threads >= 1 && threads <= 1024;
    const auto shared_limit = static_cast<std::uint32_t>(function->max_dynamic_shared_memory);
    if (!fits || config->shared_memory > shared_limit) {
      return kInvalidValue;
    }
    for (std::uint32_t i = 0; i < config->attribute_count; ++i) {
      if (config->attributes[i].id != 6) {
        return kInvalidValue;
      }
      launch.dependent = config->attributes[i].value;
    }
    launch.function = function->name.c_str();
    launch.parameters = parameters;
    launch.stream = config->stream;
    launch.context = function->module->context;
    std::memcpy(launch.grid, config->grid, sizeof(launch.grid));
    std::memcpy(launch.block, config->block, sizeof(launch.block));
    launch.shared_memory = config->shared_memory;
    launch.image = function->module->image;
    callback = state().callback;
  }
  return callback == nullptr ? static_cast<int>(kSuccess) : callback(&launch);
}
#endif

#if !defined(STANDIN_CUDA_11) && !defined(STANDIN_CUDA_10)

// What a CUtensorMap of the stand-in holds.
struct TensorMap {
  void* address;
  // The bit that drivers up to CUDA 13.1 must not set in the maps of small tensors.
  std::uint64_t mark;
  std::uint64_t sizes[5];
  std::uint64_t strides[4];
  std::uint32_t box[5];
  std::uint16_t rank;
  std::uint8_t type;
  std::uint8_t swizzle;
};
static_assert(sizeof(TensorMap) <= 128);
constexpr std::uint64_t kMark = 1U << 21;

// Bytes of a CUtensorMapDataType's element; 0 for those that no kernel of ours has.
std::uint32_t ElementSize(int type) {
  switch (type) {
    case 6:
    case 9:
      return 2;
    case 7:
      return 4;
    default:
      return 0;
  }
}

EXPORT int cuTensorMapEncodeTiled(void* map, int type, std::uint32_t rank, void* address,
                                  const std::uint64_t* sizes, const std::uint64_t* strides,
                                  const std::uint32_t* box, const std::uint32_t* element_strides,
                                  int interleave, int swizzle, int l2_promotion, int fill) {
  BEGIN("cuTensorMapEncodeTiled");
  const bool aligned = reinterpret_cast<std::uintptr_t>(map) % 64 == 0 &&
                       reinterpret_cast<std::uintptr_t>(address) % 16 == 0;
  const std::uint32_t element = ElementSize(type);
  if (!aligned || address == nullptr || element == 0 || rank < 2 || rank > 5 || interleave != 0 ||
      swizzle < 0 || swizzle > 3 || l2_promotion != 2 || fill != 0) {
    return kInvalidValue;
  }
  // A swizzled box is as wide as the swizzle's span at most.
  const std::uint32_t width = box[0] * element;
  if (width % 16 != 0 || (swizzle != 0 && width > (16U << swizzle))) {
    return kInvalidValue;
  }
  TensorMap encoded = {};
  encoded.address = address;
  encoded.mark = kMark;
  encoded.rank = static_cast<std::uint16_t>(rank);
  encoded.type = static_cast<std::uint8_t>(type);
  encoded.swizzle = static_cast<std::uint8_t>(swizzle);
  for (std::uint32_t axis = 0; axis < rank; ++axis) {
    if (sizes[axis] == 0 || sizes[axis] > (std::uint64_t{1} << 32) || box[axis] == 0 ||
        box[axis] > 256 || element_strides[axis] != 1) {
      return kInvalidValue;
    }
    encoded.sizes[axis] = sizes[axis];
    encoded.box[axis] = box[axis];
    if (axis + 1 < rank) {
      if (strides[axis] == 0 || strides[axis] % 16 != 0 || strides[axis] >> 40 != 0) {
        return kInvalidValue;
      }
      encoded.strides[axis] = strides[axis];
    }
  }
  std::memset(map, 0, 128);
  std::memcpy(map, &encoded, sizeof(encoded));
  return kSuccess;
}
#endif

// Versions of ONNX Runtime's CUDA provider before 1.23 look for these while they are loaded. No
// test's file has an operator that calls one.
#define UNUSED(name) \
  EXPORT int name() { return kNotSupported; }
UNUSED(cuLaunchCooperativeKernel)
UNUSED(cuLaunchKernel)
UNUSED(cuLinkAddData_v2)
UNUSED(cuLinkAddFile_v2)
UNUSED(cuLinkComplete)
UNUSED(cuLinkCreate_v2)
UNUSED(cuLinkDestroy)
#undef UNUSED
