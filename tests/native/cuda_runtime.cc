// What stands for CUDA's runtime library, as far as ONNX Runtime's CUDA provider needs it for files
// of MoE nodes alone: the host's memory is the device's, streams are those of the stand-in for the
// driver, and a captured graph is what the tests say. All other functions that the provider links
// to are made beside it, and do nothing.
#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>

namespace {

constexpr std::size_t kMemory = std::size_t{8} << 30;
// cudaDevAttr…, and places in cudaDeviceProp, of CUDA 11 to 13.
constexpr int kMultiprocessors = 16;
constexpr int kMajor = 75;
constexpr std::size_t kPropertiesSize = 700;
constexpr std::size_t kTotalMemory = 288;
constexpr std::size_t kSharedMemory = 296;
constexpr std::size_t kWarpSize = 308;
constexpr std::size_t kMaxThreads = 320;
constexpr std::size_t kMajorPlace = 360;

int (*on_graph)(int) = nullptr;
int capture = 0;
bool capturing = false;
void* context = nullptr;

// A function of the stand-in for the driver, which the tests have loaded.
template <typename Function>
Function Driver(const char* name) {
  void* const found = dlsym(RTLD_DEFAULT, name);
  if (found == nullptr) {
    std::fprintf(stderr, "the stand-in for the driver has no %s\n", name);
    std::abort();
  }
  return reinterpret_cast<Function>(found);
}

int Allocate(void** memory, std::size_t size) {
  *memory = std::aligned_alloc(256, (size + 511) / 256 * 256);
  std::memset(*memory, 0xFF, size);
  return 0;
}

int Handle(void** handle) {
  *handle = std::malloc(8);
  return 0;
}

template <typename Value>
void Put(char* properties, std::size_t place, Value value) {
  std::memcpy(properties + place, &value, sizeof(value));
}

}  // namespace

extern "C" {

// Is called with 1 where a capture begins, 2 where it ends, 3 where a graph is launched.
void cuda_runtime_on_graph(int (*function)(int)) { on_graph = function; }

int cudaGetDeviceCount(int* count) {
  *count = 1;
  return 0;
}
int cudaGetDevice(int* device) {
  *device = 0;
  return 0;
}
int cudaSetDevice(int /*device*/) {
  if (context == nullptr) {
    Driver<int (*)(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 0);
  }
  return Driver<int (*)(void*)>("cuCtxSetCurrent")(context);
}
int cudaGetDeviceProperties(char* properties, int /*device*/) {
  std::memset(properties, 0, kPropertiesSize);
  Put(properties, kTotalMemory, kMemory);
  Put(properties, kSharedMemory, std::size_t{49152});
  Put(properties, kWarpSize, 32);
  Put(properties, kMaxThreads, 1024);
  Put(properties, kMajorPlace, 8);
  return 0;
}
int cudaGetDeviceProperties_v2(char* properties, int device) {
  return cudaGetDeviceProperties(properties, device);
}
int cudaDeviceGetAttribute(int* value, int attribute, int /*device*/) {
  *value = attribute == kMultiprocessors ? 100 : attribute == kMajor ? 8 : 0;
  return 0;
}
int cudaRuntimeGetVersion(int* version) {
  *version = 13000;
  return 0;
}
int cudaDriverGetVersion(int* version) { return cudaRuntimeGetVersion(version); }
const char* cudaGetErrorString(int /*error*/) { return ""; }
const char* cudaGetErrorName(int /*error*/) { return ""; }

int cudaMemGetInfo(std::size_t* free, std::size_t* total) {
  *free = *total = kMemory;
  return 0;
}
int cudaMalloc(void** memory, std::size_t size) { return Allocate(memory, size); }
int cudaMallocHost(void** memory, std::size_t size) { return Allocate(memory, size); }
int cudaHostAlloc(void** memory, std::size_t size, unsigned /*flags*/) {
  return Allocate(memory, size);
}
int cudaFree(void* memory) {
  std::free(memory);
  return 0;
}
int cudaFreeHost(void* memory) { return cudaFree(memory); }
int cudaPointerGetAttributes(int* attributes, const void* /*memory*/) {
  std::memset(attributes, 0, 24);
  attributes[0] = 2;  // The device's.
  return 0;
}
int cudaMemcpy(void* to, const void* from, std::size_t size, int /*kind*/) {
  std::memcpy(to, from, size);
  return 0;
}
int cudaMemcpyAsync(void* to, const void* from, std::size_t size, int kind, void* /*stream*/) {
  return cudaMemcpy(to, from, size, kind);
}
int cudaMemset(void* memory, int value, std::size_t size) {
  std::memset(memory, value, size);
  return 0;
}
int cudaMemsetAsync(void* memory, int value, std::size_t size, void* /*stream*/) {
  return cudaMemset(memory, value, size);
}

int cudaStreamCreateWithFlags(void** stream, unsigned /*flags*/) {
  cudaSetDevice(0);
  *stream = Driver<void* (*)(void*)>("standin_create_stream")(context);
  return 0;
}
int cudaStreamCreate(void** stream) { return cudaStreamCreateWithFlags(stream, 0); }
int cudaEventCreate(void** event) { return Handle(event); }
int cudaEventCreateWithFlags(void** event, unsigned /*flags*/) { return Handle(event); }

int cudaStreamIsCapturing(void* /*stream*/, int* status) {
  *status = capturing ? 1 : 0;
  return 0;
}
int cudaStreamBeginCapture(void* stream, int /*mode*/) {
  capture = Driver<int (*)(void*)>("standin_begin_capture")(stream);
  capturing = true;
  return on_graph == nullptr ? 0 : on_graph(1);
}
int cudaStreamEndCapture(void* /*stream*/, void** graph) {
  Driver<void (*)(int)>("standin_end_capture")(capture);
  capturing = false;
  Handle(graph);
  return on_graph == nullptr ? 0 : on_graph(2);
}
int cudaGraphInstantiate(void** executable, void* /*graph*/, unsigned long long /*flags*/) {
  return Handle(executable);
}
int cudaGraphLaunch(void* /*executable*/, void* /*stream*/) {
  return on_graph == nullptr ? 0 : on_graph(3);
}

void** __cudaRegisterFatBinary(void* /*binary*/) {
  static void* handle[1] = {};
  return handle;
}
}
