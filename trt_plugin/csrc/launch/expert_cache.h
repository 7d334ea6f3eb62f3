// The experts of an offloaded layer that are on a device, and what is needed to exchange them: the
// layer's state, a second stream, and events.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/bundle.h"
#include "launch/driver.h"
#include "launch/host_weights.h"
#include "launch/modules.h"
#include "launch/tensor_map.h"
#include "status.h"

namespace dynamo_moe {

// Where the tensors that store the experts' matrices lie in files.
struct ExpertSources {
  // In the order of StoredTensors().
  std::vector<format::Tensor> names;
  std::vector<WeightsSource> tensors;

  // Reads where they lie, a line for each, and checks the files and that the tensors have a layer's
  // sizes.
  static Status Open(const dynamo_moe_layer& layer, std::string_view w1, std::string_view w2,
                     ExpertSources* sources);
};

// The bytes of a layer's state; 0 where it is fully resident.
Status StateSize(const Program& program, std::size_t* bytes);

// Lives in the first context that it is used in. Calls use it, once it is prepared, one after
// another under its lock.
class ExpertCache {
 public:
  // Without sources, each call has the addresses of w1, w2 and what belongs to them. With sources,
  // shared caches of equal layers with the same weights are one in each context. Calls of a shared
  // cache may be on any streams; those of another follow one another by the caller's order.
  ExpertCache(std::optional<ExpertSources> sources, bool shared);
  ExpertCache(const ExpertCache&) = delete;
  ExpertCache& operator=(const ExpertCache&) = delete;
  ~ExpertCache();

  std::mutex& mutex();
  // Why weights are copies, and what to do; empty if the files' own pages are pinned. Stays where
  // it is once the cache is prepared.
  const char* note() const;

  // Allocates the state and pins the weights in the current context, at the first call.
  Status Prepare(const cuda::Driver& driver, const ContextIdentity& current,
                 const Program& program);

  // Begins a call of a prepared cache: waits for the last one if the cache is shared, empties the
  // cache if its experts are not the call's, and sets the weights to their sources.
  Status Begin(cuda::Stream stream, dynamo_moe_tensors* tensors);
  // Ends it. After a failure, nothing of it runs on the second stream once the stream has passed,
  // and the cache is empty if a kernel was launched.
  Status End(cuda::Stream stream, const Status& call, bool launched);

  char* state(std::uint32_t part) const;
  TensorMaps& maps();
  cuda::Stream side() const;

  // The second stream's work after this waits for the stream's before it, and the other way round.
  Status Fork(cuda::Stream stream);
  Status Join(cuda::Stream stream);
  // Marks the end of a wave's launch on a stream; a stream's later work waits for the last mark.
  Status Mark(std::uint32_t launch, cuda::Stream stream);
  Status Await(std::uint32_t launch, cuda::Stream stream);

 private:
  class Device;

  Status Empty(cuda::Stream stream);

  const std::optional<ExpertSources> sources_;
  const bool shared_;
  mutable std::mutex mutex_;
  // Null until the cache is prepared, then always the same.
  std::shared_ptr<Device> device_;
};

}  // namespace dynamo_moe
