#include "launch/modules.h"

#include <algorithm>
#include <iterator>
#include <string>
#include <string_view>
#include <unordered_map>

namespace dynamo_moe {
namespace {

// A kernel may use this much without an attribute.
constexpr std::uint32_t kDefaultSharedMemory = 48 * 1024;

Status Attribute(const cuda::Driver& driver, int attribute, cuda::Device device, int* value) {
  const cuda::Result result = driver.device_get_attribute(value, attribute, device);
  return result == cuda::kSuccess ? Status()
                                  : cuda::Failure(driver, result, "cuDeviceGetAttribute");
}

Status NoContext() {
  return InvalidArgument(
      "this thread has no current CUDA context: a CUDA runtime call such as cudaFree(0) makes "
      "the device's current");
}

Status CurrentContext(const cuda::Driver& driver, cuda::Context* context, unsigned long long* id) {
  DYNAMO_MOE_RETURN_IF_ERROR(FindContext(driver, context));
  if (*context == nullptr) {
    return NoContext();
  }
  *id = 0;
  if (driver.context_get_id != nullptr) {
    const cuda::Result id_result = driver.context_get_id(*context, id);
    if (id_result != cuda::kSuccess) {
      return cuda::Failure(driver, id_result, "cuCtxGetId");
    }
  }
  return {};
}

Status CurrentDevice(const cuda::Driver& driver, cuda::Device* device) {
  const cuda::Result result = driver.context_get_device(device);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuCtxGetDevice");
}

// The current context's device, or the only device if there is no context.
Status CurrentOrOnlyDevice(const cuda::Driver& driver, cuda::Device* device) {
  cuda::Context context = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(FindContext(driver, &context));
  if (context != nullptr) {
    return CurrentDevice(driver, device);
  }
  int count = 0;
  if (const cuda::Result result = driver.device_get_count(&count); result != cuda::kSuccess) {
    return cuda::Failure(driver, result, "cuDeviceGetCount");
  }
  if (count != 1) {
    return NoContext();
  }
  const cuda::Result result = driver.device_get(device, 0);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuDeviceGet");
}

}  // namespace

Status FindContext(const cuda::Driver& driver, cuda::Context* context) {
  const cuda::Result result = driver.context_get_current(context);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuCtxGetCurrent");
}

Status CurrentArchitecture(const cuda::Driver& driver, std::uint32_t* architecture) {
  cuda::Device device = 0;
  int major = 0;
  int minor = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentOrOnlyDevice(driver, &device));
  DYNAMO_MOE_RETURN_IF_ERROR(Attribute(driver, cuda::kComputeCapabilityMajor, device, &major));
  DYNAMO_MOE_RETURN_IF_ERROR(Attribute(driver, cuda::kComputeCapabilityMinor, device, &minor));
  *architecture = static_cast<std::uint32_t>(10 * major + minor);
  return {};
}

LoadedKernels::~LoadedKernels() {
  if (modules_.empty()) {
    return;
  }
  // If the context is gone, so are its modules, and another context may have its address.
  unsigned long long id = context_id_;
  if (driver_.context_get_id != nullptr &&
      (driver_.context_get_id(context_, &id) != cuda::kSuccess || id != context_id_)) {
    return;
  }
  cuda::ScopedContext scope(driver_);
  if (scope.Push(context_) != cuda::kSuccess) {
    return;
  }
  const cuda::RelaxedCapture relaxed(driver_);
  for (cuda::Module module : modules_) {
    driver_.module_unload(module);
  }
}

Status LoadedKernels::Load(const Program& program) {
  std::uint32_t architecture = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentArchitecture(driver_, &architecture));
  if (!RunsOn(program.architecture(), architecture)) {
    return InvalidArgument("the program is for sm_", program.architecture(),
                           ", the current device is sm_", architecture);
  }
  cuda::Device device = 0;
  int shared_limit = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentDevice(driver_, &device));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Attribute(driver_, cuda::kMaxSharedMemoryPerBlockOptin, device, &shared_limit));
  const cuda::RelaxedCapture relaxed(driver_);
  modules_.reserve(program.kernels().size());
  functions_.reserve(program.kernels().size());
  for (const format::Kernel& kernel : program.kernels()) {
    DYNAMO_MOE_RETURN_IF_ERROR(LoadKernel(program, kernel, shared_limit));
  }
  return {};
}

Status LoadedKernels::LoadKernel(const Program& program, const format::Kernel& kernel,
                                 int shared_limit) {
  const std::string name(program.text(kernel.name));
  if (kernel.shared_memory > static_cast<std::uint32_t>(std::max(shared_limit, 0))) {
    return InvalidArgument("kernel ", name, " needs ", kernel.shared_memory,
                           " bytes of shared memory, the device permits ", shared_limit);
  }
  cuda::Module module = nullptr;
  cuda::Result result = driver_.module_load_data(&module, program.image(kernel));
  if (result != cuda::kSuccess) {
    return cuda::Failure(driver_, result, Text("kernel ", name, ": cuModuleLoadData"));
  }
  modules_.push_back(module);
  cuda::Function function = nullptr;
  result = driver_.module_get_function(&function, module, name.c_str());
  if (result != cuda::kSuccess) {
    return cuda::Failure(driver_, result, Text("kernel ", name, ": cuModuleGetFunction"));
  }
  if (kernel.shared_memory > kDefaultSharedMemory) {
    result = driver_.function_set_attribute(function, cuda::kMaxDynamicSharedSizeBytes,
                                            static_cast<int>(kernel.shared_memory));
    if (result != cuda::kSuccess) {
      return cuda::Failure(driver_, result, Text("kernel ", name, ": cuFuncSetAttribute"));
    }
    // The same hint as Triton's: without it, an SM may have shared memory for fewer blocks.
    if (driver_.function_set_cache_config != nullptr) {
      driver_.function_set_cache_config(function, cuda::kPreferShared);
    }
  }
  functions_.push_back(function);
  return {};
}

Status SharedProgram::Open(const void* data, std::size_t size,
                           std::shared_ptr<SharedProgram>* shared) {
  // Never destroyed: a handle may be closed after static objects are.
  static auto& mutex = *new std::mutex;
  static auto& in_use = *new std::unordered_multimap<std::size_t, std::weak_ptr<SharedProgram>>;
  if (data == nullptr) {
    return InvalidArgument("program: the data is a null pointer");
  }
  const std::string_view bytes(static_cast<const char*>(data), size);
  const std::size_t key = std::hash<std::string_view>()(bytes);
  const std::scoped_lock lock(mutex);
  const auto [begin, end] = in_use.equal_range(key);
  for (auto each = begin; each != end; ++each) {
    std::shared_ptr<SharedProgram> found = each->second.lock();
    if (found != nullptr && found->program_.bytes() == bytes) {
      *shared = std::move(found);
      return {};
    }
  }
  // Unused programs keep their memory until their entries are erased.
  for (auto each = in_use.begin(); each != in_use.end();) {
    each = each->second.expired() ? in_use.erase(each) : std::next(each);
  }
  auto opened = std::make_shared<SharedProgram>();
  DYNAMO_MOE_RETURN_IF_ERROR(Program::Parse(data, size, &opened->program_));
  in_use.emplace(key, opened);
  *shared = std::move(opened);
  return {};
}

Status SharedProgram::Kernels(const cuda::Driver& driver,
                              std::shared_ptr<const LoadedKernels>* kernels) {
  cuda::Context context = nullptr;
  unsigned long long context_id = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentContext(driver, &context, &context_id));
  *kernels = Find(context, context_id);
  if (*kernels != nullptr) {
    return {};
  }
  const std::scoped_lock lock(loading_);
  *kernels = Find(context, context_id);
  if (*kernels != nullptr) {
    return {};
  }
  auto loaded = std::make_shared<LoadedKernels>(driver, context, context_id);
  DYNAMO_MOE_RETURN_IF_ERROR(loaded->Load(program_));
  *kernels = loaded;
  const std::scoped_lock change(finding_);
  // An earlier context at this address is gone.
  const auto gone = std::find_if(loaded_.begin(), loaded_.end(),
                                 [&](const auto& each) { return each->IsAt(context); });
  if (gone != loaded_.end()) {
    *gone = std::move(loaded);
  } else {
    loaded_.push_back(std::move(loaded));
  }
  return {};
}

std::shared_ptr<const LoadedKernels> SharedProgram::Find(cuda::Context context,
                                                         unsigned long long context_id) const {
  const std::shared_lock lock(finding_);
  const auto found = std::find_if(loaded_.begin(), loaded_.end(), [&](const auto& each) {
    return each->IsFor(context, context_id);
  });
  return found == loaded_.end() ? nullptr : *found;
}

}  // namespace dynamo_moe
