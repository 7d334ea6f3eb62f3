#include "launch/expert_cache.h"

#include <iterator>
#include <map>
#include <tuple>
#include <utility>

#include "bundle/layer.h"
#include "launch/buffers.h"

namespace dynamo_moe {
namespace {

using Weights = std::shared_ptr<const HostWeights>;

Status Check(const cuda::Driver& driver, cuda::Result result, const char* function) {
  return result == cuda::kSuccess ? Status() : cuda::Failure(driver, result, function);
}

Status StateOffsets(const Program& program, std::size_t* offsets, std::size_t* end) {
  return BufferOffsets(program, program.state(), program.SizesFor(0), "state", offsets, end);
}

}  // namespace

Status ExpertSources::Open(const dynamo_moe_layer& layer, std::string_view w1, std::string_view w2,
                           ExpertSources* sources) {
  std::uint64_t w1_bytes = 0;
  std::uint64_t w2_bytes = 0;
  if (!WeightBytes(layer, &w1_bytes, &w2_bytes)) {
    return InvalidArgument("the layer's experts would have 2^64 bytes or more");
  }
  const auto open = [](const char* name, std::string_view text, std::uint64_t wanted,
                       WeightsSource* source) -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(WeightsSource::Parse(text, source));
    if (source->bytes != wanted) {
      return InvalidArgument("the layer's ", name, " must have ", wanted, " bytes, it has ",
                             source->bytes, " in ", source->path);
    }
    return source->Check();
  };
  DYNAMO_MOE_RETURN_IF_ERROR(open("w1", w1, w1_bytes, &sources->w1));
  return open("w2", w2, w2_bytes, &sources->w2);
}

Status StateSize(const Program& program, std::size_t* bytes) {
  std::size_t offsets[format::kMaxBuffers];
  return StateOffsets(program, offsets, bytes);
}

// What a cache, or each of those that share it, has in one context. The destructor releases it.
class ExpertCache::Device {
 public:
  Device(const cuda::Driver& driver, const cuda::OffloadDriver& offload,
         const ContextIdentity& context, const Program& program, Weights w1, Weights w2)
      : driver_(driver),
        offload_(offload),
        context_(context),
        program_(program),
        maps_(program),
        w1_(std::move(w1)),
        w2_(std::move(w2)) {}
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
    if (w1_ != nullptr) {
      const bool both = !w1_->note().empty() && !w2_->note().empty();
      note_ = Text(w1_->note(), both ? "; " : "", w2_->note());
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
    const void* w1 = nullptr;
    const void* w2 = nullptr;
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
  // Null without sources.
  const HostWeights* w1() const { return w1_.get(); }
  const HostWeights* w2() const { return w2_.get(); }

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
  const Weights w1_;
  const Weights w2_;
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
  Weights w1;
  Weights w2;
  if (sources_.has_value()) {
    DYNAMO_MOE_RETURN_IF_ERROR(HostWeights::Open(driver, *offload, current, sources_->w1, &w1));
    DYNAMO_MOE_RETURN_IF_ERROR(HostWeights::Open(driver, *offload, current, sources_->w2, &w2));
  }
  const auto open = [&] {
    auto device = std::make_shared<Device>(driver, *offload, current, program, w1, w2);
    DYNAMO_MOE_RETURN_IF_ERROR(device->Open());
    device_ = std::move(device);
    return Status();
  };
  if (!shared_ || w1 == nullptr) {
    return open();
  }
  // Equal programs in use are one, as are equal weights of one context.
  using Key = std::tuple<const Program*, const HostWeights*, const HostWeights*>;
  static std::mutex sharing;
  // Never destroyed: caches may outlive static objects.
  static auto* const shared = new std::map<Key, std::weak_ptr<Device>>();
  const std::scoped_lock search(sharing);
  for (auto each = shared->begin(); each != shared->end();) {
    each = each->second.expired() ? shared->erase(each) : std::next(each);
  }
  std::weak_ptr<Device>& known = (*shared)[{&program, w1.get(), w2.get()}];
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
        "an expert cache that contexts share cannot be captured: a graph does not wait for the "
        "other contexts' calls; with the attribute expert_cache=0, each context has its own");
  }
  if (sources_.has_value()) {
    tensors->w1 = device_->w1()->address();
    tensors->w2 = device_->w2()->address();
  }
  const bool others = calls.has_run && (tensors->w1 != calls.w1 || tensors->w2 != calls.w2);
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
  calls.w1 = tensors->w1;
  calls.w2 = tensors->w2;
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
