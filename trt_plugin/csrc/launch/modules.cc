#include "launch/modules.h"

#include <algorithm>
#include <string>
#include <utility>

namespace dynamo_moe {
namespace {

// A kernel may use this much without an attribute.
constexpr std::uint32_t kDefaultSharedMemory = 48 * 1024;

Status Attribute(const cuda::Driver& driver, int attribute, cuda::Device device, int* value) {
  const cuda::Result result = driver.device_get_attribute(value, attribute, device);
  return result == cuda::kSuccess ? Status()
                                  : cuda::Failure(driver, result, "cuDeviceGetAttribute");
}

Status CurrentDevice(const cuda::Driver& driver, cuda::Device* device) {
  const cuda::Result result = driver.context_get_device(device);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuCtxGetDevice");
}

}  // namespace

Status FindContext(const cuda::Driver& driver, cuda::Context* context) {
  const cuda::Result result = driver.context_get_current(context);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuCtxGetCurrent");
}

Status CurrentContext(const cuda::Driver& driver, ContextIdentity* context) {
  DYNAMO_MOE_RETURN_IF_ERROR(FindContext(driver, &context->handle));
  if (context->handle == nullptr) {
    return InvalidArgument(
        "this thread has no current CUDA context: a CUDA runtime call such as cudaFree(0) makes "
        "the device's current");
  }
  context->id = 0;
  if (driver.context_get_id != nullptr) {
    const cuda::Result result = driver.context_get_id(context->handle, &context->id);
    if (result != cuda::kSuccess) {
      return cuda::Failure(driver, result, "cuCtxGetId");
    }
  }
  return {};
}

Status DeviceAttribute(const cuda::Driver& driver, int attribute, int* value) {
  cuda::Device device = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentDevice(driver, &device));
  return Attribute(driver, attribute, device, value);
}

Status ArchitectureOf(const cuda::Driver& driver, const ContextIdentity& current,
                      std::uint32_t* architecture) {
  thread_local ContextIdentity known;
  thread_local std::uint32_t known_architecture = 0;
  // Without a number, another device's context may have taken a context's place.
  if (current == known && current.id != 0) {
    *architecture = known_architecture;
    return {};
  }
  cuda::Device device = 0;
  int major = 0;
  int minor = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentDevice(driver, &device));
  DYNAMO_MOE_RETURN_IF_ERROR(Attribute(driver, cuda::kComputeCapabilityMajor, device, &major));
  DYNAMO_MOE_RETURN_IF_ERROR(Attribute(driver, cuda::kComputeCapabilityMinor, device, &minor));
  *architecture = static_cast<std::uint32_t>(10 * major + minor);
  known = current;
  known_architecture = *architecture;
  return {};
}

bool EnterIfAlive(const cuda::Driver& driver, const ContextIdentity& context,
                  cuda::ScopedContext* scope) {
  unsigned long long id = context.id;
  // Another context may have its address.
  if (driver.context_get_id != nullptr &&
      (driver.context_get_id(context.handle, &id) != cuda::kSuccess || id != context.id)) {
    return false;
  }
  return scope->Push(context.handle) == cuda::kSuccess;
}

LoadedKernels::~LoadedKernels() {
  if (modules_.empty()) {
    return;
  }
  cuda::ScopedContext scope(driver_);
  // If the context is gone, so are its modules.
  if (!EnterIfAlive(driver_, context_, &scope)) {
    return;
  }
  const cuda::RelaxedCapture relaxed(driver_);
  for (cuda::Module module : modules_) {
    driver_.module_unload(module);
  }
}

Status LoadedKernels::Load(const Program& program) {
  int shared_limit = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(
      DeviceAttribute(driver_, cuda::kMaxSharedMemoryPerBlockOptin, &shared_limit));
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
    const char* const hint = result == cuda::kOutOfMemory
                                 ? ""
                                 : "; the driver must be 525 or later, 580 for sm_100 and later";
    const Status failed =
        cuda::Failure(driver_, result, Text("kernel ", name, ": cuModuleLoadData"));
    return {failed.code(), Text(failed.message(), hint)};
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

Status SharedProgram::Read(std::string_view bytes, std::shared_ptr<const std::string> owner) {
  return Program::Parse(bytes.data(), bytes.size(), &program_, "program", std::move(owner));
}

Status SharedProgram::Kernels(const cuda::Driver& driver, const ContextIdentity& current,
                              std::shared_ptr<const LoadedKernels>* kernels) {
  *kernels = Find(current);
  if (*kernels != nullptr) {
    return {};
  }
  const std::scoped_lock lock(loading_);
  *kernels = Find(current);
  if (*kernels != nullptr) {
    return {};
  }
  auto loaded = std::make_shared<LoadedKernels>(driver, current);
  DYNAMO_MOE_RETURN_IF_ERROR(loaded->Load(program_));
  *kernels = loaded;
  const std::scoped_lock change(finding_);
  // An earlier context at this address is gone.
  const auto gone = std::find_if(loaded_.begin(), loaded_.end(), [&](const auto& each) {
    return each->context().handle == current.handle;
  });
  if (gone != loaded_.end()) {
    *gone = std::move(loaded);
  } else {
    loaded_.push_back(std::move(loaded));
  }
  return {};
}

std::shared_ptr<const LoadedKernels> SharedProgram::Find(const ContextIdentity& context) const {
  const std::shared_lock lock(finding_);
  const auto found = std::find_if(loaded_.begin(), loaded_.end(),
                                  [&](const auto& each) { return each->context() == context; });
  return found == loaded_.end() ? nullptr : *found;
}

}  // namespace dynamo_moe
