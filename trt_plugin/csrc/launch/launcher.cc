#include "launch/launcher.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <iterator>
#include <limits>
#include <string>

#include "bundle/checks.h"
#include "bundle/layer.h"
#include "launch/buffers.h"
#include "launch/in_use.h"
#include "launch/tensor_map.h"

namespace dynamo_moe {
namespace {

constexpr std::uint64_t kPointerAlignment = 16;
constexpr unsigned kWarpSize = 32;
constexpr std::size_t kAxes = 3;
// Blocks along x, y and z, the same on every architecture.
constexpr std::int64_t kGridLimits[kAxes] = {2147483647, 65535, 65535};

// "0" starts each kernel after those ahead of it have ended; what it waits for is then there.
constexpr const char* kDependentLaunchVariable = "DYNAMO_MOE_DEPENDENT_LAUNCH";

bool PermitsDependentLaunch() {
  const char* const value = std::getenv(kDependentLaunchVariable);
  return value == nullptr || std::strcmp(value, "0") != 0;
}

bool IsAligned(const void* pointer, std::uint64_t alignment) {
  return reinterpret_cast<std::uintptr_t>(pointer) % alignment == 0;
}

// A layer whose experts do not all fit is called with its cache, and no other layer is.
Status CheckCache(const Program& program, const ExpertCache* cache) {
  const bool offloaded = program.layer().resident_experts != 0;
  if (offloaded == (cache != nullptr)) {
    return {};
  }
  return offloaded ? InvalidArgument("the layer's experts are offloaded: it needs a cache of them")
                   : InvalidArgument("the layer's experts are not offloaded: it has no cache");
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

// One call of Enqueue: its tensors, workspace and cache.
class Launcher::Call {
 public:
  Call(Launcher* launcher, const cuda::Driver& driver, const LoadedKernels& kernels,
       const dynamo_moe_tensors& tensors, void* workspace, ExpertCache* cache)
      : launcher_(*launcher),
        driver_(driver),
        kernels_(kernels),
        tensors_(tensors),
        workspace_(static_cast<char*>(workspace)),
        cache_(cache),
        maps_(cache == nullptr ? launcher->maps_ : cache->maps()) {}

  Status Run(const format::Range& range, std::int64_t tokens, std::size_t workspace_size,
             cuda::Stream stream) {
    const Program& program = launcher_.program();
    sizes_ = program.SizesFor(tokens);
    std::size_t needed = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(
        BufferOffsets(program, program.buffers(range), sizes_, "workspace", offsets_, &needed));
    if (needed > workspace_size) {
      return InvalidArgument(tokens, " tokens need a workspace of ", needed, " bytes, it has ",
                             workspace_size);
    }
    if (needed > 0 &&
        (workspace_ == nullptr || !IsAligned(workspace_, format::kWorkspaceAlignment))) {
      return InvalidArgument("the workspace must begin at a multiple of ",
                             format::kWorkspaceAlignment, " and not be null");
    }
    DYNAMO_MOE_RETURN_IF_ERROR(StartAll(program.launches(range), stream));
    if (cache_ != nullptr && program.wave(range).size() > 0) {
      DYNAMO_MOE_RETURN_IF_ERROR(RunWaves(range, stream));
    }
    return StartAll(program.epilogue(range), stream);
  }

  // Whether a kernel has been.
  bool launched() const { return launched_; }

 private:
  Status StartAll(Span<format::Launch> launches, cuda::Stream stream) {
    for (const format::Launch& launch : launches) {
      std::int64_t grid[kAxes] = {};
      DYNAMO_MOE_RETURN_IF_ERROR(Grid(launch, grid));
      DYNAMO_MOE_RETURN_IF_ERROR(Start(launch, grid, stream));
    }
    return {};
  }

  Status RunWaves(const format::Range& range, cuda::Stream stream) {
    const Program& program = launcher_.program();
    std::int64_t waves = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(program.Evaluate(range.waves, sizes_, &waves));
    if (waves < 0 || waves > format::kMaxExperts) {
      return InvalidArgument("there would be ", waves, " waves, permitted are 0..",
                             format::kMaxExperts, ", for ", sizes_.values[format::kTokens],
                             " tokens");
    }
    std::uint32_t awaited = 0;
    for (const format::Launch& launch : program.wave(range)) {
      awaited |= launch.after;
    }
    DYNAMO_MOE_RETURN_IF_ERROR(cache_->Fork(stream));
    std::uint32_t marked = 0;
    for (std::int64_t wave = 0; wave < waves; ++wave) {
      sizes_.values[format::kWave] = wave;
      DYNAMO_MOE_RETURN_IF_ERROR(RunWave(program.wave(range), stream, awaited, &marked));
    }
    sizes_.values[format::kWave] = 0;
    return cache_->Join(stream);
  }

  // Marks the ends of the launches that others wait for; `marked` has a bit for each.
  Status RunWave(Span<format::Launch> wave, cuda::Stream stream, std::uint32_t awaited,
                 std::uint32_t* marked) {
    for (std::uint32_t i = 0; i < wave.size(); ++i) {
      const format::Launch& launch = wave[i];
      cuda::Stream on = (launch.flags & format::kOnSide) != 0 ? cache_->side() : stream;
      std::int64_t grid[kAxes] = {};
      DYNAMO_MOE_RETURN_IF_ERROR(Grid(launch, grid));
      if (std::find(std::begin(grid), std::end(grid), 0) != std::end(grid)) {
        continue;
      }
      for (std::uint32_t other = 0; other < wave.size(); ++other) {
        if (((launch.after & *marked) >> other & 1) != 0) {
          DYNAMO_MOE_RETURN_IF_ERROR(cache_->Await(other, on));
        }
      }
      DYNAMO_MOE_RETURN_IF_ERROR(Start(launch, grid, on));
      if ((awaited >> i & 1) != 0) {
        DYNAMO_MOE_RETURN_IF_ERROR(cache_->Mark(i, on));
        *marked |= 1U << i;
      }
    }
    return {};
  }

  Status Grid(const format::Launch& launch, std::int64_t (&grid)[kAxes]) const {
    for (std::size_t axis = 0; axis < kAxes; ++axis) {
      DYNAMO_MOE_RETURN_IF_ERROR(
          launcher_.program().Evaluate(launch.grid[axis], sizes_, &grid[axis]));
    }
    return {};
  }

  Status Start(const format::Launch& launch, const std::int64_t (&grid)[kAxes],
               cuda::Stream stream) {
    const Program& program = launcher_.program();
    const format::Kernel& kernel = program.kernels()[launch.kernel];
    cuda::LaunchConfig config = {};
    for (std::size_t axis = 0; axis < kAxes; ++axis) {
      const std::int64_t blocks = grid[axis];
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
    const cuda::Result result =
        driver_.launch(&config, kernels_.function(launch.kernel), parameters_, nullptr);
    if (result != cuda::kSuccess) {
      return cuda::Failure(driver_, result,
                           Text("kernel ", program.text(kernel.name), ": cuLaunchKernelEx"));
    }
    launched_ = true;
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
        const format::TensorMap& record = program.tensor_maps()[argument.index];
        const void* address = nullptr;
        if (record.kind == format::kTensor) {
          DYNAMO_MOE_RETURN_IF_ERROR(CheckTensor(record.index, kernel));
          address = Tensor(record.index);
        } else {
          address = cache_->state(record.index);
        }
        cuda::TensorMap* const map = &used_maps_[maps_used_++];
        parameters_[position] = map;
        return maps_.Encode(driver_, argument.index, address, map);
      }
      case format::kStatePointer:
        value.pointer = cache_->state(argument.index);
        return {};
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
  const LoadedKernels& kernels_;
  const dynamo_moe_tensors& tensors_;
  char* workspace_;
  // Null where all experts are resident.
  ExpertCache* cache_;
  TensorMaps& maps_;
  Sizes sizes_ = {};
  std::size_t offsets_[format::kMaxBuffers] = {};
  Value values_[format::kMaxArguments] = {};
  void* parameters_[format::kMaxArguments] = {};
  cuda::TensorMap used_maps_[format::kMaxTensorMaps] = {};
  std::size_t maps_used_ = 0;
  bool launched_ = false;
};

Launcher::Launcher(std::shared_ptr<SharedProgram> shared)
    : shared_(std::move(shared)),
      dependent_launch_(PermitsDependentLaunch()),
      maps_(shared_->program()) {}

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
    DYNAMO_MOE_RETURN_IF_ERROR(BufferOffsets(program(), program().buffers(range),
                                             program().SizesFor(range.first_tokens), "workspace",
                                             offsets, &least));
    DYNAMO_MOE_RETURN_IF_ERROR(BufferOffsets(program(), program().buffers(range),
                                             program().SizesFor(tokens), "workspace", offsets,
                                             &largest));
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

Status Launcher::Prepare(const cuda::Driver& driver, const ContextIdentity& current,
                         ExpertCache* cache) {
  std::shared_ptr<const LoadedKernels> kernels;
  DYNAMO_MOE_RETURN_IF_ERROR(shared_->Kernels(driver, current, &kernels));
  if (cache == nullptr) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCache(program(), cache));
  return cache->Prepare(driver, current, program());
}

Status Launcher::Enqueue(const cuda::Driver& driver, const ContextIdentity& current,
                         std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                         std::size_t workspace_size, cuda::Stream stream, ExpertCache* cache) {
  const format::Range* const range = program().RangeOf(tokens);
  if (range == nullptr) {
    return InvalidArgument("the number of tokens must be in 0..",
                           (program().ranges().end() - 1)->last_tokens, ", got ", tokens);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckCache(program(), cache));
  std::shared_ptr<const LoadedKernels> kernels;
  DYNAMO_MOE_RETURN_IF_ERROR(shared_->Kernels(driver, current, &kernels));
  if (cache == nullptr) {
    return Call(this, driver, *kernels, tensors, workspace, nullptr)
        .Run(*range, tokens, workspace_size, stream);
  }
  dynamo_moe_tensors with_weights = tensors;
  DYNAMO_MOE_RETURN_IF_ERROR(cache->Prepare(driver, current, program()));
  const std::scoped_lock lock(cache->mutex());
  DYNAMO_MOE_RETURN_IF_ERROR(cache->Begin(stream, &with_weights));
  Call call(this, driver, *kernels, with_weights, workspace, cache);
  const Status status = call.Run(*range, tokens, workspace_size, stream);
  return cache->End(stream, status, call.launched());
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
                           std::shared_ptr<LayerLauncher>* layer) {
  if (data == nullptr) {
    return InvalidArgument("program: the data is a null pointer");
  }
  std::shared_ptr<SharedLayer> shared;
  DYNAMO_MOE_RETURN_IF_ERROR(
      InUse<SharedLayer>::All().Open({static_cast<const char*>(data), size}, &shared));
  layer->reset(new LayerLauncher(std::move(shared)));
  return {};
}

Status LayerLauncher::Find(const ContentKey& key, std::shared_ptr<LayerLauncher>* layer) {
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

Status LayerLauncher::StateSize(std::size_t* bytes) const {
  *bytes = 0;
  for (const std::unique_ptr<Launcher>& each : launchers_) {
    std::size_t needed = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::StateSize(each->program(), &needed));
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

Status LayerLauncher::Prepare(ExpertCache* cache) const {
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
  return launcher->Prepare(*driver, current, cache);
}

Status LayerLauncher::Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors,
                              void* workspace, std::size_t workspace_size, cuda::Stream stream,
                              ExpertCache* cache) const {
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
  return launcher->Enqueue(*driver, current, tokens, tensors, workspace, workspace_size, stream,
                           cache);
}

}  // namespace dynamo_moe
