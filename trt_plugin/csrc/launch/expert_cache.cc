#include "launch/expert_cache.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <map>
#include <utility>

#include "bundle/layer.h"
#include "launch/buffers.h"

namespace dynamo_moe {
namespace {

using Weights = std::vector<std::shared_ptr<const HostWeights>>;
// The addresses of the tensors that store w1 and w2; null for those that a layer has not.
using Addresses = std::array<const void*, kMaxStoredTensors>;

Status Check(const cuda::Driver& driver, cuda::Result result, const char* function) {
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, function);
}

Addresses WeightsOf(const dynamo_moe_tensors& tensors) {
  return {tensors.w1, tensors.w1_scales, tensors.w1_zero_points, tensors.w1_global_scales,
          tensors.w2, tensors.w2_scales, tensors.w2_zero_points, tensors.w2_global_scales};
}

// Sets the addresses of tensors to those of their sources.
void SetWeights(const std::vector<format::Tensor>& names, const Weights& weights,
                dynamo_moe_tensors* tensors) {
  for (std::size_t i = 0; i < weights.size(); ++i) {
    const void* const address = weights[i]->address();
    std::memcpy(reinterpret_cast<char*>(tensors) + (names[i] * sizeof(address)), &address,
                sizeof(address));
  }
}

Status StateOffsets(const Program& program, std::size_t* offsets, std::size_t* end) {
  return BufferOffsets(program, program.state(), program.SizesFor(0), "state", offsets, end);
}

}  // namespace

Status ExpertSources::Open(const dynamo_moe_layer& layer, std::string_view w1, std::string_view w2,
                           ExpertSources* sources) {
  std::vector<StoredTensor> stored;
  if (!StoredTensors(layer, &stored)) {
    return InvalidArgument("the layer's experts would have 2^64 bytes or more");
  }
  std::string_view w1_lines = w1;
  std::string_view w2_lines = w2;
  for (const auto& [tensor, bytes] : stored) {
    std::string_view* const lines = tensor < format::kW2 ? &w1_lines : &w2_lines;
    if (lines->empty() && tensor != format::kW1 && tensor != format::kW2) {
      return InvalidArgument("the layer's ", format::kTensorNames[tensor],
                             " has no source: each tensor of a weight is on a line of its own");
    }
    const std::size_t end = std::min(lines->find('\n'), lines->size());
    WeightsSource& source = sources->tensors.emplace_back();
    DYNAMO_MOE_RETURN_IF_ERROR(WeightsSource::Parse(lines->substr(0, end), &source));
    lines->remove_prefix(std::min(end + 1, lines->size()));
    if (source.bytes != bytes) {
      return InvalidArgument("the layer's ", format::kTensorNames[tensor], " must have ", bytes,
                             " bytes, it has ", source.bytes, " in ", source.path);
    }
    DYNAMO_MOE_RETURN_IF_ERROR(source.Check());
    sources->names.push_back(tensor);
  }
  if (!w1_lines.empty() || !w2_lines.empty()) {
    return InvalidArgument("the layer has ", stored.size(),
                           " tensors of w1 and w2, the sources have more");
  }
  return {};
}

Status StateSize(const Program& program, std::size_t* bytes) {
  std::size_t offsets[format::kMaxBuffers];
  return StateOffsets(program, offsets, bytes);
}

// What a cache, or each of those that share it, has in one context. The destructor releases it.
class ExpertCache::Device {
 public:
  Device(const cuda::Driver& driver, const cuda::OffloadDriver& offload,
         const ContextIdentity& context, const Program& program, Weights weights)
      : driver_(driver),
        offload_(offload),
        context_(context),
        program_(program),
        maps_(program),
        weights_(std::move(weights)) {}
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  ~Device() {
    cuda::ScopedContext scope(driver_);
    // If the context is gone, so is all that it had.
    if (!EnterIfAlive(driver_, context_, &scope)) {
      return;
    }
    const cuda::RelaxedCapture relaxed(driver_);
    for (cuda::Event event : {fork_, join_, done_}) {
      Destroy(event);
    }
    for (cuda::Event event : ends_) {
      Destroy(event);
    }
    if (side_ != nullptr) {
      offload_.stream_destroy(side_);
    }
    if (memory_ != nullptr) {
      offload_.memory_free(memory_);
    }
  }

  Status Open() {
    const cuda::RelaxedCapture relaxed(driver_);
    std::size_t size = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(StateOffsets(program_, offsets_, &size));
    if (const cuda::Result result = offload_.memory_allocate(&memory_, size);
        result != cuda::kSuccess) {
      memory_ = nullptr;
      return cuda::Failure(driver_, result,
                           Text("the expert cache's ", size, " bytes: cuMemAlloc"));
    }
    // Copies are short and products fill the device: a copy must not wait until they leave room.
    int least = 0;
    int greatest = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(Check(driver_, offload_.context_get_priorities(&least, &greatest),
                                     "cuCtxGetStreamPriorityRange"));
    DYNAMO_MOE_RETURN_IF_ERROR(Check(driver_,
                                     offload_.stream_create(&side_, cuda::kNonBlocking, greatest),
                                     "cuStreamCreateWithPriority"));
    for (cuda::Event* event : {&fork_, &join_, &done_}) {
      DYNAMO_MOE_RETURN_IF_ERROR(Create(event));
    }
    for (const format::Range& range : program_.ranges()) {
      for (const format::Launch& launch : program_.wave(range)) {
        for (std::uint32_t other = 0; other < format::kMaxWaveLaunches; ++other) {
          if ((launch.after >> other & 1) != 0 && ends_[other] == nullptr) {
            DYNAMO_MOE_RETURN_IF_ERROR(Create(&ends_[other]));
          }
        }
      }
    }
    DYNAMO_MOE_RETURN_IF_ERROR(Clear(side_));
    DYNAMO_MOE_RETURN_IF_ERROR(
        Check(driver_, offload_.stream_synchronize(side_), "cuStreamSynchronize"));
    for (const auto& each : weights_) {
      note_ += Text(note_.empty() || each->note().empty() ? "" : "; ", each->note());
    }
    return {};
  }

  // Empties the cache.
  Status Clear(cuda::Stream stream) const {
    std::uint32_t part = 0;
    for (const format::Buffer& buffer : program_.state()) {
      std::int64_t size = 0;
      DYNAMO_MOE_RETURN_IF_ERROR(program_.Evaluate(buffer.size, program_.SizesFor(0), &size));
      if ((buffer.flags & format::kZeroed) != 0) {
        DYNAMO_MOE_RETURN_IF_ERROR(
            Check(driver_,
                  offload_.memory_set(memory_ + offsets_[part], 0, static_cast<std::size_t>(size),
                                      stream),
                  "cuMemsetD8Async"));
      }
      ++part;
    }
    return {};
  }

  Status IsCapturing(cuda::Stream stream, bool* capturing) const {
    int status = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(
        Check(driver_, offload_.stream_is_capturing(stream, &status), "cuStreamIsCapturing"));
    *capturing = status != 0;
    return {};
  }

  Status Record(cuda::Event event, cuda::Stream stream) const {
    return Check(driver_, offload_.event_record(event, stream), "cuEventRecord");
  }

  Status Wait(cuda::Stream stream, cuda::Event event) const {
    return Check(driver_, offload_.stream_wait_event(stream, event, 0), "cuStreamWaitEvent");
  }

  // What its calls, one after another under the lock, leave to the next one.
  struct Calls {
    std::mutex mutex;
    // What the slots may hold does not match the tables: the cache could not be emptied.
    bool dirty = false;
    // The call is captured.
    bool capturing = false;
    // The second stream may have work that the call's stream does not wait for yet.
    bool forked = false;
    // Of the last call.
    bool has_run = false;
    Addresses weights = {};
  };

  Calls& calls() { return calls_; }
  const char* note() const { return note_.c_str(); }
  const ContextIdentity& context() const { return context_; }
  const Program& program() const { return program_; }
  char* at(std::uint32_t part) const { return memory_ + offsets_[part]; }
  TensorMaps& maps() { return maps_; }
  cuda::Stream side() const { return side_; }
  cuda::Event fork() const { return fork_; }
  cuda::Event join() const { return join_; }
  // Of the last call of a shared cache.
  cuda::Event done() const { return done_; }
  // Of a launch of a wave.
  cuda::Event end(std::uint32_t launch) const { return ends_[launch]; }
  // In the order of StoredTensors(); empty without sources.
  const Weights& weights() const { return weights_; }

 private:
  Status Create(cuda::Event* event) const {
    return Check(driver_, offload_.event_create(event, cuda::kDisableTiming), "cuEventCreate");
  }

  void Destroy(cuda::Event event) const {
    if (event != nullptr) {
      offload_.event_destroy(event);
    }
  }

  const cuda::Driver& driver_;
  const cuda::OffloadDriver& offload_;
  const ContextIdentity context_;
  const Program& program_;
  TensorMaps maps_;
  cuda::Address memory_ = nullptr;
  std::size_t offsets_[format::kMaxBuffers] = {};
  cuda::Stream side_ = nullptr;
  cuda::Event fork_ = nullptr;
  cuda::Event join_ = nullptr;
  cuda::Event done_ = nullptr;
  cuda::Event ends_[format::kMaxWaveLaunches] = {};
  const Weights weights_;
  std::string note_;
  Calls calls_;
};

ExpertCache::ExpertCache(std::optional<ExpertSources> sources, bool shared)
    : sources_(std::move(sources)), shared_(shared) {}

ExpertCache::~ExpertCache() = default;

const char* ExpertCache::note() const {
  const std::scoped_lock lock(mutex_);
  return device_ == nullptr ? "" : device_->note();
}

Status ExpertCache::Prepare(const cuda::Driver& driver, const ContextIdentity& current,
                            const Program& program) {
  const std::scoped_lock lock(mutex_);
  if (device_ != nullptr) {
    return device_->context() == current
               ? Status()
               : InvalidArgument("the expert cache lies in another CUDA context");
  }
  Status status;
  const cuda::OffloadDriver* const offload = cuda::LoadOffload(&status);
  if (offload == nullptr) {
    return status;
  }
  Weights weights;
  if (sources_.has_value()) {
    for (const WeightsSource& source : sources_->tensors) {
      DYNAMO_MOE_RETURN_IF_ERROR(
          HostWeights::Open(driver, *offload, current, source, &weights.emplace_back()));
    }
  }
  const auto open = [&] {
    auto device = std::make_shared<Device>(driver, *offload, current, program, weights);
    DYNAMO_MOE_RETURN_IF_ERROR(device->Open());
    device_ = std::move(device);
    return Status();
  };
  if (!shared_ || weights.empty()) {
    return open();
  }
  // Equal programs in use are one, as are equal weights of one context.
  using Key = std::pair<const Program*, std::vector<const HostWeights*>>;
  static std::mutex sharing;
  // Never destroyed: caches may outlive static objects.
  static auto* const shared = new std::map<Key, std::weak_ptr<Device>>();
  const std::scoped_lock search(sharing);
  for (auto each = shared->begin(); each != shared->end();) {
    each = each->second.expired() ? shared->erase(each) : std::next(each);
  }
  Key key = {&program, {}};
  for (const auto& each : weights) {
    key.second.push_back(each.get());
  }
  std::weak_ptr<Device>& known = (*shared)[std::move(key)];
  device_ = known.lock();
  if (device_ == nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(open());
    known = device_;
  }
  return {};
}

std::mutex& ExpertCache::mutex() { return device_->calls().mutex; }

Status ExpertCache::Begin(cuda::Stream stream, dynamo_moe_tensors* tensors) {
  Device::Calls& calls = device_->calls();
  DYNAMO_MOE_RETURN_IF_ERROR(device_->IsCapturing(stream, &calls.capturing));
  if (calls.capturing && shared_) {
    return InvalidArgument(
        "an expert cache that contexts or streams share cannot be captured: a graph does not wait "
        "for the others' calls; with the attribute expert_cache=0, each has its own");
  }
  if (sources_.has_value()) {
    SetWeights(sources_->names, device_->weights(), tensors);
  }
  const Addresses weights = WeightsOf(*tensors);
  const bool others = calls.has_run && weights != calls.weights;
  const bool clear = calls.dirty || others;
  if (calls.capturing && clear) {
    return InvalidArgument("the expert cache must be emptied, since ",
                           others ? "the weights are others" : "a call has failed",
                           ": run the layer once outside of the capture first");
  }
  if (shared_) {
    // Even of the same handle: that of the default stream means another one in each thread.
    DYNAMO_MOE_RETURN_IF_ERROR(device_->Wait(stream, device_->done()));
  }
  if (clear) {
    calls.dirty = true;
    DYNAMO_MOE_RETURN_IF_ERROR(Empty(stream));
  }
  calls.has_run = true;
  calls.weights = weights;
  return {};
}

Status ExpertCache::End(cuda::Stream stream, const Status& call, bool launched) {
  Device::Calls& calls = device_->calls();
  Status status = call;
  if (!status.ok() && calls.capturing) {
    // What is captured does not run: it is only joined, so that the capture can end.
    static_cast<void>(calls.forked ? Join(stream) : Status());
    calls.forked = false;
  } else if (!status.ok() && launched) {
    // At once, since a graph that is replayed next empties nothing. If it fails, the next call
    // does.
    calls.dirty = true;
    static_cast<void>(Empty(stream));
  }
  if (shared_) {
    const Status recorded = device_->Record(device_->done(), stream);
    calls.dirty = calls.dirty || !recorded.ok();
    status = status.ok() ? recorded : status;
  }
  return status;
}

Status ExpertCache::Empty(cuda::Stream stream) {
  Device::Calls& calls = device_->calls();
  if (calls.forked) {
    DYNAMO_MOE_RETURN_IF_ERROR(Join(stream));
  }
  DYNAMO_MOE_RETURN_IF_ERROR(device_->Clear(stream));
  calls.dirty = false;
  return {};
}

char* ExpertCache::state(std::uint32_t part) const { return device_->at(part); }

TensorMaps& ExpertCache::maps() { return device_->maps(); }

cuda::Stream ExpertCache::side() const { return device_->side(); }

Status ExpertCache::Fork(cuda::Stream stream) {
  DYNAMO_MOE_RETURN_IF_ERROR(device_->Record(device_->fork(), stream));
  DYNAMO_MOE_RETURN_IF_ERROR(device_->Wait(side(), device_->fork()));
  device_->calls().forked = true;
  return {};
}

Status ExpertCache::Join(cuda::Stream stream) {
  DYNAMO_MOE_RETURN_IF_ERROR(device_->Record(device_->join(), side()));
  DYNAMO_MOE_RETURN_IF_ERROR(device_->Wait(stream, device_->join()));
  device_->calls().forked = false;
  return {};
}

Status ExpertCache::Mark(std::uint32_t launch, cuda::Stream stream) {
  return device_->Record(device_->end(launch), stream);
}

Status ExpertCache::Await(std::uint32_t launch, cuda::Stream stream) {
  return device_->Wait(stream, device_->end(launch));
}

}  // namespace dynamo_moe
