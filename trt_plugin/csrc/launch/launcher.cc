#include "launch/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string>

#include "bundle/checks.h"
#include "bundle/layer.h"
#include "launch/in_use.h"
#include "launch/tensor_map.h"

namespace dynamo_moe {
namespace {

constexpr std::uint64_t kPointerAlignment = 16;
constexpr unsigned kWarpSize = 32;
// Blocks along x, y and z, the same on every architecture.
constexpr std::int64_t kGridLimits[3] = {2147483647, 65535, 65535};

// "0" starts each kernel after those ahead of it have ended; what it waits for is then there.
constexpr const char* kDependentLaunchVariable = "DYNAMO_MOE_DEPENDENT_LAUNCH";

bool PermitsDependentLaunch() {
  const char* const value = std::getenv(kDependentLaunchVariable);
  return value == nullptr || std::strcmp(value, "0") != 0;
}

bool IsAligned(const void* pointer, std::uint64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

Status BufferOffsets(const Program& program, const format::Range& range, const Sizes& sizes,
                     std::size_t* offsets, std::size_t* end) {
  std::size_t index = 0;
  *end = 0;
  for (const format::Buffer& buffer : program.buffers(range)) {
    std::int64_t size = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(program.Evaluate(buffer.size, sizes, &size));
    constexpr std::int64_t kLimit = std::numeric_limits<std::int64_t>::max() / 4;
    if (size < 0 || size > kLimit || *end > static_cast<std::size_t>(kLimit)) {
      return InvalidArgument("the workspace's part ", program.text(buffer.name), " would have ",
                             size, " bytes for ", sizes.values[format::kTokens], " tokens");
    }
    offsets[index++] = *end;
    const std::uint64_t alignment = format::kWorkspaceAlignment;
    *end += (static_cast<std::size_t>(size) + alignment - 1) / alignment * alignment;
  }
  return {};
}

// Makes the stream's context current in a thread that has none.
Status EnterContextOf(cuda::Stream stream, const cuda::Driver& driver, cuda::ScopedContext* scope) {
  cuda::Context context = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(FindContext(driver, &context));
  if (context != nullptr || stream == nullptr) {
    return {};
  }
  if (const cuda::Result result = driver.stream_get_context(stream, &context);
      result != cuda::kSuccess) {
    return cuda::Failure(driver, result, "cuStreamGetCtx");
  }
  const cuda::Result result = scope->Push(context);
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, "cuCtxPushCurrent");
}

}  // namespace

// One call of Enqueue: its tensors and workspace.
class Launcher::Call {
 public:
  Call(Launcher* launcher, const cuda::Driver& driver, const dynamo_moe_tensors& tensors,
       void* workspace)
      : launcher_(*launcher),
        driver_(driver),
        tensors_(tensors),
        workspace_(static_cast<char*>(workspace)) {}

  Status Run(const format::Range& range, const LoadedKernels& kernels, std::int64_t tokens,
             std::size_t workspace_size, cuda::Stream stream) {
    const Program& program = launcher_.program();
    sizes_ = program.SizesFor(tokens);
    std::size_t needed = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(BufferOffsets(program, range, sizes_, offsets_, &needed));
    if (needed > workspace_size) {
      return InvalidArgument(tokens, " tokens need a workspace of ", needed, " bytes, it has ",
                             workspace_size);
    }
    if (needed > 0 &&
        (workspace_ == nullptr || !IsAligned(workspace_, format::kWorkspaceAlignment))) {
      return InvalidArgument("the workspace must begin at a multiple of ",
                             format::kWorkspaceAlignment, " and not be null");
    }
    for (const format::Launch& launch : program.launches(range)) {
      DYNAMO_MOE_RETURN_IF_ERROR(Start(launch, kernels.function(launch.kernel), stream));
    }
    return {};
  }

 private:
  Status Start(const format::Launch& launch, cuda::Function function, cuda::Stream stream) {
    const Program& program = launcher_.program();
    const format::Kernel& kernel = program.kernels()[launch.kernel];
    cuda::LaunchConfig config = {};
    for (int axis = 0; axis < 3; ++axis) {
      std::int64_t blocks = 0;
      DYNAMO_MOE_RETURN_IF_ERROR(program.Evaluate(launch.grid[axis], sizes_, &blocks));
      if (blocks < 1 || blocks > kGridLimits[axis]) {
        return InvalidArgument("kernel ", program.text(kernel.name), " would have ", blocks,
                               " blocks along ", std::string(1, "xyz"[axis]), ", permitted are 1..",
                               kGridLimits[axis], ", for ", sizes_.values[format::kTokens],
                               " tokens");
      }
      config.grid[axis] = static_cast<unsigned>(blocks);
    }
    config.block[0] = kWarpSize * kernel.warps;
    config.block[1] = config.block[2] = 1;
    config.shared_memory = kernel.shared_memory;
    config.stream = stream;
    cuda::LaunchAttribute dependent = {};
    dependent.id = cuda::kProgrammaticStreamSerialization;
    dependent.value.programmatic_stream_serialization = 1;
    if (launcher_.dependent_launch_ && (kernel.flags & format::kDependentLaunch) != 0) {
      config.attributes = &dependent;
      config.attribute_count = 1;
    }

    maps_used_ = 0;
    std::size_t count = 0;
    for (const format::Argument& argument : program.arguments(launch)) {
      DYNAMO_MOE_RETURN_IF_ERROR(Resolve(argument, kernel, count));
      ++count;
    }
    const cuda::Result result = driver_.launch(&config, function, parameters_, nullptr);
    if (result != cuda::kSuccess) {
      return cuda::Failure(driver_, result,
                           Text("kernel ", program.text(kernel.name), ": cuLaunchKernelEx"));
    }
    return {};
  }

  // Stores an argument's value, and its address in the list of parameters.
  Status Resolve(const format::Argument& argument, const format::Kernel& kernel,
                 std::size_t position) {
    const Program& program = launcher_.program();
    Value& value = values_[position];
    parameters_[position] = &value;
    switch (argument.kind) {
      case format::kTensor:
        value.pointer = Tensor(argument.index);
        return CheckTensor(argument.index, kernel);
      case format::kWorkspace:
        value.pointer = workspace_ + offsets_[argument.index];
        return {};
      case format::kInt32:
      case format::kInt64:
        DYNAMO_MOE_RETURN_IF_ERROR(program.Evaluate(argument.index, sizes_, &value.integer));
        return argument.kind == format::kInt64 ? Status() : Narrow(kernel, &value);
      case format::kTensorMap: {
        const std::uint32_t tensor = program.tensor_maps()[argument.index].tensor;
        DYNAMO_MOE_RETURN_IF_ERROR(CheckTensor(tensor, kernel));
        cuda::TensorMap* const map = &maps_[maps_used_++];
        parameters_[position] = map;
        return launcher_.Encode(driver_, argument.index, Tensor(tensor), map);
      }
      default:
        value.pointer = nullptr;
        return {};
    }
  }

  // The tensors of a call in the order of format::Tensor.
  const void* Tensor(std::uint32_t index) const {
    static_assert(sizeof(dynamo_moe_tensors) == format::kTensors * sizeof(void*));
    const void* pointer = nullptr;
    std::memcpy(&pointer, reinterpret_cast<const char*>(&tensors_) + (index * sizeof(pointer)),
                sizeof(pointer));
    return pointer;
  }

  Status CheckTensor(std::uint32_t tensor, const format::Kernel& kernel) const {
    const void* const pointer = Tensor(tensor);
    if (pointer == nullptr) {
      return InvalidArgument("tensor ", format::kTensorNames[tensor], " is null, kernel ",
                             launcher_.program().text(kernel.name), " needs it");
    }
    if (!IsAligned(pointer, kPointerAlignment)) {
      return InvalidArgument("tensor ", format::kTensorNames[tensor],
                             " must begin at a multiple of ", kPointerAlignment, " bytes");
    }
    return {};
  }

  union Value {
    const void* pointer;
    std::int64_t integer;
    std::int32_t narrow;
  };

  Status Narrow(const format::Kernel& kernel, Value* value) const {
    const std::int64_t integer = value->integer;
    if (integer < std::numeric_limits<std::int32_t>::min() ||
        integer > std::numeric_limits<std::int32_t>::max()) {
      return InvalidArgument("kernel ", launcher_.program().text(kernel.name),
                             " takes a 32-bit integer, which would be ", integer, " for ",
                             sizes_.values[format::kTokens], " tokens");
    }
    value->narrow = static_cast<std::int32_t>(integer);
    return {};
  }

  Launcher& launcher_;
  const cuda::Driver& driver_;
  const dynamo_moe_tensors& tensors_;
  char* workspace_;
  Sizes sizes_ = {};
  std::size_t offsets_[format::kMaxBuffers] = {};
  Value values_[format::kMaxArguments] = {};
  void* parameters_[format::kMaxArguments] = {};
  cuda::TensorMap maps_[format::kMaxTensorMaps] = {};
  std::size_t maps_used_ = 0;
};

Launcher::Launcher(std::shared_ptr<SharedProgram> shared)
    : shared_(std::move(shared)),
      dependent_launch_(PermitsDependentLaunch()),
      maps_(shared_->program().tensor_maps().size()) {}

Status Launcher::WorkspaceSize(std::int64_t max_tokens, std::size_t* bytes) const {
  const format::Range* const last = program().ranges().end() - 1;
  if (max_tokens < 0 || max_tokens > last->last_tokens) {
    return InvalidArgument("the number of tokens must be in 0..", last->last_tokens, ", got ",
                           max_tokens);
  }
  std::size_t most = 0;
  for (const format::Range& range : program().ranges()) {
    if (range.first_tokens > max_tokens) {
      break;
    }
    const std::int64_t tokens = std::min(max_tokens, range.last_tokens);
    std::size_t least = 0;
    std::size_t largest = 0;
    std::size_t offsets[format::kMaxBuffers];
    DYNAMO_MOE_RETURN_IF_ERROR(
        BufferOffsets(program(), range, program().SizesFor(range.first_tokens), offsets, &least));
    DYNAMO_MOE_RETURN_IF_ERROR(
        BufferOffsets(program(), range, program().SizesFor(tokens), offsets, &largest));
    if (least > largest) {
      return InvalidBundle("program: the workspace must not shrink as tokens grow, has ", least,
                           " bytes for ", range.first_tokens, " tokens and ", largest, " for ",
                           tokens, " tokens");
    }
    most = std::max(most, largest);
  }
  *bytes = most;
  return {};
}

Status Launcher::Prepare(const cuda::Driver& driver, const ContextIdentity& current) {
  std::shared_ptr<const LoadedKernels> kernels;
  return shared_->Kernels(driver, current, &kernels);
}

Status Launcher::Enqueue(const cuda::Driver& driver, const ContextIdentity& current,
                         std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                         std::size_t workspace_size, cuda::Stream stream) {
  const format::Range* const range = program().RangeOf(tokens);
  if (range == nullptr) {
    return InvalidArgument("the number of tokens must be in 0..",
                           (program().ranges().end() - 1)->last_tokens, ", got ", tokens);
  }
  std::shared_ptr<const LoadedKernels> kernels;
  DYNAMO_MOE_RETURN_IF_ERROR(shared_->Kernels(driver, current, &kernels));
  return Call(this, driver, tensors, workspace)
      .Run(*range, *kernels, tokens, workspace_size, stream);
}

Status Launcher::Encode(const cuda::Driver& driver, std::size_t index, const void* address,
                        cuda::TensorMap* map) {
  const std::scoped_lock lock(encoding_);
  EncodedMap& encoded = maps_[index];
  if (encoded.address != address) {
    // Encoding may fail.
    encoded.address = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(
        EncodeTensorMap(driver, program().tensor_maps()[index], address, &encoded.map));
    encoded.address = address;
  }
  *map = encoded.map;
  return {};
}

Status SharedLayer::Read(std::string_view bytes) {
  bytes_ = std::make_shared<const std::string>(bytes);
  std::vector<std::string_view> programs = {*bytes_};
  if (IsBundle(*bytes_)) {
    Bundle bundle;
    DYNAMO_MOE_RETURN_IF_ERROR(Bundle::Open(bytes_->data(), bytes_->size(), &bundle));
    programs.clear();
    for (const Bundle::Entry& each : bundle.programs()) {
      if (!SameLayer(each.layer, bundle.programs().front().layer)) {
        return InvalidBundle("bundle: its programs must be of one layer, program ", programs.size(),
                             " is of another than program 0");
      }
      programs.push_back(each.bytes);
    }
  }
  for (const std::string_view program : programs) {
    DYNAMO_MOE_RETURN_IF_ERROR(
        InUse<SharedProgram>::All().Open(program, &programs_.emplace_back(), bytes_));
  }
  return {};
}

LayerLauncher::LayerLauncher(std::shared_ptr<SharedLayer> shared) : shared_(std::move(shared)) {
  for (const std::shared_ptr<SharedProgram>& program : shared_->programs()) {
    launchers_.push_back(std::make_unique<Launcher>(program));
  }
}

Status LayerLauncher::Open(const void* data, std::size_t size,
                           std::unique_ptr<LayerLauncher>* layer) {
  if (data == nullptr) {
    return InvalidArgument("program: the data is a null pointer");
  }
  std::shared_ptr<SharedLayer> shared;
  DYNAMO_MOE_RETURN_IF_ERROR(
      InUse<SharedLayer>::All().Open({static_cast<const char*>(data), size}, &shared));
  layer->reset(new LayerLauncher(std::move(shared)));
  return {};
}

Status LayerLauncher::Find(const ContentKey& key, std::unique_ptr<LayerLauncher>* layer) {
  std::shared_ptr<SharedLayer> shared = InUse<SharedLayer>::All().Find(key);
  if (shared == nullptr) {
    return {DYNAMO_MOE_NOT_FOUND,
            Text("no kernels of ", key.size, " bytes with hash ", key.hash, " are open")};
  }
  layer->reset(new LayerLauncher(std::move(shared)));
  return {};
}

Status LayerLauncher::WorkspaceSize(std::int64_t max_tokens, std::size_t* bytes) const {
  *bytes = 0;
  for (const std::unique_ptr<Launcher>& each : launchers_) {
    std::size_t needed = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(each->WorkspaceSize(max_tokens, &needed));
    *bytes = std::max(*bytes, needed);
  }
  return {};
}

Status LayerLauncher::Choose(const cuda::Driver& driver, const ContextIdentity& current,
                             Launcher** launcher) const {
  std::uint32_t device = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(ArchitectureOf(driver, current, &device));
  std::uint32_t best = 0;
  std::string known;
  for (const std::unique_ptr<Launcher>& each : launchers_) {
    const std::uint32_t architecture = each->program().architecture();
    if (RunsOn(architecture, device) && architecture > best) {
      best = architecture;
      *launcher = each.get();
    }
  }
  if (best != 0) {
    return {};
  }
  for (const std::unique_ptr<Launcher>& each : launchers_) {
    known += Text(known.empty() ? "" : ", ", "sm_", each->program().architecture());
  }
  return {DYNAMO_MOE_NOT_FOUND,
          Text("the device is sm_", device, ", the layer's kernels are for ", known,
               ": compile them for it too, with dynamo-moe compile --arch sm_", device)};
}

Status LayerLauncher::Prepare() const {
  Status status;
  const cuda::Driver* const driver = cuda::Load(&status);
  if (driver == nullptr) {
    return status;
  }
  cuda::Context context = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(FindContext(*driver, &context));
  if (context == nullptr) {
    // Enqueue loads them into its stream's.
    return {};
  }
  ContextIdentity current;
  Launcher* launcher = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentContext(*driver, &current));
  DYNAMO_MOE_RETURN_IF_ERROR(Choose(*driver, current, &launcher));
  return launcher->Prepare(*driver, current);
}

Status LayerLauncher::Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors,
                              void* workspace, std::size_t workspace_size,
                              cuda::Stream stream) const {
  if (tokens == 0) {
    return {};
  }
  Status status;
  const cuda::Driver* const driver = cuda::Load(&status);
  if (driver == nullptr) {
    return status;
  }
  cuda::ScopedContext scope(*driver);
  ContextIdentity current;
  Launcher* launcher = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(EnterContextOf(stream, *driver, &scope));
  DYNAMO_MOE_RETURN_IF_ERROR(CurrentContext(*driver, &current));
  DYNAMO_MOE_RETURN_IF_ERROR(Choose(*driver, current, &launcher));
  return launcher->Enqueue(*driver, current, tokens, tensors, workspace, workspace_size, stream);
}

}  // namespace dynamo_moe
