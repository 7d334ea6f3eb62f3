// The CUDA driver, loaded at run time: this library builds without a CUDA toolkit and loads without
// a GPU.
//
// The types repeat the driver's binary interface (cuda.h of CUDA 12 and 13). This header includes
// only the standard library.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "status.h"

namespace dynamo_moe::cuda {

using Result = int;
using Device = int;
using Context = struct ContextTag*;
using Module = struct ModuleTag*;
using Function = struct FunctionTag*;
using Stream = struct StreamTag*;
using Event = struct EventTag*;
// CUdeviceptr, an integer of a pointer's size.
using Address = char*;

inline constexpr Result kSuccess = 0;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNoDevice = 100;

// CUdevice_attribute
inline constexpr int kComputeCapabilityMajor = 75;
inline constexpr int kComputeCapabilityMinor = 76;
inline constexpr int kMaxSharedMemoryPerBlockOptin = 97;
inline constexpr int kReadOnlyHostRegisterSupported = 113;
// CUfunction_attribute
inline constexpr int kMaxDynamicSharedSizeBytes = 8;
// CUfunc_cache
inline constexpr int kPreferShared = 1;
// CUstreamCaptureMode
inline constexpr int kRelaxed = 2;
// CUlaunchAttributeID
inline constexpr int kProgrammaticStreamSerialization = 6;
// Drivers up to this version, 13.1, mark maps of small tensors wrongly: see EncodeTensorMap.
inline constexpr int kLastVersionMarkingSmallMaps = 13010;
// CUstream_flags, CUevent_flags
inline constexpr unsigned kNonBlocking = 1;
inline constexpr unsigned kDisableTiming = 2;
// CU_MEMHOSTREGISTER_*, CU_MEMHOSTALLOC_*: the device has an address of the memory, and only reads.
inline constexpr unsigned kHostMapped = 2;
inline constexpr unsigned kHostReadOnly = 8;
// CUtensorMapL2promotion: what Triton asks for.
inline constexpr int kL2Promotion128B = 2;

struct alignas(8) LaunchAttribute {
  int id;
  int padding;
  union {
    char bytes[64];
    int programmatic_stream_serialization;
  } value;
};
static_assert(sizeof(LaunchAttribute) == 72);

struct LaunchConfig {
  unsigned grid[3];
  unsigned block[3];
  unsigned shared_memory;
  Stream stream;
  LaunchAttribute* attributes;
  unsigned attribute_count;
};
static_assert(sizeof(LaunchConfig) == 56);

// CUDA 12 aligns it to 64 bytes.
struct alignas(128) TensorMap {
  std::uint64_t opaque[16];
};
static_assert(sizeof(TensorMap) == 128);

// The functions that the launcher calls.
struct Driver {
  Result (*init)(unsigned flags);
  Result (*driver_get_version)(int* version);
  Result (*get_error_name)(Result error, const char** name);
  Result (*get_error_string)(Result error, const char** text);
  Result (*context_get_current)(Context* context);
  Result (*context_push)(Context context);
  Result (*context_pop)(Context* context);
  Result (*context_get_device)(Device* device);
  Result (*stream_get_context)(Stream stream, Context* context);
  Result (*device_get_attribute)(int* value, int attribute, Device device);
  Result (*module_load_data)(Module* module, const void* image);
  Result (*module_unload)(Module module);
  Result (*module_get_function)(Function* function, Module module, const char* name);
  Result (*function_set_attribute)(Function function, int attribute, int value);
  Result (*launch)(const LaunchConfig* config, Function function, void** parameters, void** extra);
  // Null if the driver lacks them; they are then not called.
  Result (*exchange_capture_mode)(int* mode);
  Result (*function_set_cache_config)(Function function, int config);
  // A context's number, which no later context gets. This function and the next are null if the
  // driver is older than CUDA 12.
  Result (*context_get_id)(Context context, unsigned long long* id);
  Result (*tensor_map_encode_tiled)(TensorMap* map, int type, std::uint32_t rank, void* address,
                                    const std::uint64_t* sizes, const std::uint64_t* strides,
                                    const std::uint32_t* box, const std::uint32_t* element_strides,
                                    int interleave, int swizzle, int l2_promotion, int fill);
};

// The driver, loaded and initialised by the first call that succeeds; null, with a status, if there
// is none.
const Driver* Load(Status* status);

// The functions that only layers with experts in host memory need.
struct OffloadDriver {
  Result (*memory_allocate)(Address* address, std::size_t size);
  Result (*memory_free)(Address address);
  Result (*memory_set)(Address address, unsigned char value, std::size_t size, Stream stream);
  Result (*host_register)(void* memory, std::size_t size, unsigned flags);
  Result (*host_unregister)(void* memory);
  Result (*host_allocate)(void** memory, std::size_t size, unsigned flags);
  Result (*host_free)(void* memory);
  Result (*host_get_address)(Address* address, void* memory, unsigned flags);
  // The numbers of the lowest and the highest priority.
  Result (*context_get_priorities)(int* least, int* greatest);
  Result (*stream_create)(Stream* stream, unsigned flags, int priority);
  Result (*stream_destroy)(Stream stream);
  Result (*stream_synchronize)(Stream stream);
  // 0 where nothing captures the stream.
  Result (*stream_is_capturing)(Stream stream, int* status);
  Result (*stream_wait_event)(Stream stream, Event event, unsigned flags);
  Result (*event_create)(Event* event, unsigned flags);
  Result (*event_record)(Event event, Stream stream);
  Result (*event_destroy)(Event event);
};

// They are looked up by the first call that succeeds; null, with a status, if one is missing.
const OffloadDriver* LoadOffload(Status* status);

// Makes a context current for as long as it lives.
class ScopedContext {
 public:
  explicit ScopedContext(const Driver& driver) : driver_(driver) {}
  ScopedContext(const ScopedContext&) = delete;
  ScopedContext& operator=(const ScopedContext&) = delete;
  ~ScopedContext();

  // May be called once.
  Result Push(Context context);

 private:
  const Driver& driver_;
  bool pushed_ = false;
};

// Permits this thread, for as long as it lives, calls that a stream capture forbids: loading a
// module would otherwise invalidate another thread's capture.
class RelaxedCapture {
 public:
  explicit RelaxedCapture(const Driver& driver);
  RelaxedCapture(const RelaxedCapture&) = delete;
  RelaxedCapture& operator=(const RelaxedCapture&) = delete;
  ~RelaxedCapture();

 private:
  const Driver& driver_;
  int mode_ = kRelaxed;
  bool changed_;
};

// A status for a result that is not kSuccess: "what: CUDA_ERROR_… (text)".
Status Failure(const Driver& driver, Result result, const std::string& what);

}  // namespace dynamo_moe::cuda
