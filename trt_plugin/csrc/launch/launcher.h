// Launches a layer's kernels for a number of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "launch/content_key.h"
#include "launch/expert_cache.h"
#include "launch/modules.h"
#include "launch/tensor_map.h"

namespace dynamo_moe {

// A program as one layer uses it: the part shared with equal programs, and maps of its own weights.
class Launcher {
 public:
  explicit Launcher(std::shared_ptr<SharedProgram> shared);

  const Program& program() const { return shared_->program(); }

  Status WorkspaceSize(std::int64_t max_tokens, std::size_t* bytes) const;
  // Loads the kernels into the current context. An offloaded layer has a cache, others have null.
  Status Prepare(const cuda::Driver& driver, const ContextIdentity& current, ExpertCache* cache);
  Status Enqueue(const cuda::Driver& driver, const ContextIdentity& current, std::int64_t tokens,
                 const dynamo_moe_tensors& tensors, void* workspace, std::size_t workspace_size,
                 cuda::Stream stream, ExpertCache* cache);

 private:
  class Call;

  std::shared_ptr<SharedProgram> shared_;
  // Whether kernels may start before those ahead of them end.
  const bool dependent_launch_;
  TensorMaps maps_;
};

// What layers of equal bytes share: the bytes, and the programs in them. A program keeps the bytes
// that it was first read from, which other layers may have too.
class SharedLayer {
 public:
  // Reads a program, or a bundle whose programs are all of one layer.
  Status Read(std::string_view bytes);

  std::string_view bytes() const { return *bytes_; }
  const std::vector<std::shared_ptr<SharedProgram>>& programs() const { return programs_; }

 private:
  std::shared_ptr<const std::string> bytes_;
  std::vector<std::shared_ptr<SharedProgram>> programs_;
};

// A layer with its programs for one or more architectures; the device decides which is launched.
class LayerLauncher {
 public:
  static Status Open(const void* data, std::size_t size, std::shared_ptr<LayerLauncher>* layer);
  // Opens what is open elsewhere in this process, by its bytes' key.
  static Status Find(const ContentKey& key, std::shared_ptr<LayerLauncher>* layer);

  std::string_view bytes() const { return shared_->bytes(); }
  const dynamo_moe_layer& layer() const { return launchers_.front()->program().layer(); }

  // Suffices for each of the programs.
  Status WorkspaceSize(std::int64_t max_tokens, std::size_t* bytes) const;
  // The most that a program needs.
  Status StateSize(std::size_t* bytes) const;
  Status Prepare(ExpertCache* cache) const;
  Status Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                 std::size_t workspace_size, cuda::Stream stream, ExpertCache* cache) const;

 private:
  explicit LayerLauncher(std::shared_ptr<SharedLayer> shared);

  Status Choose(const cuda::Driver& driver, const ContextIdentity& current,
                Launcher** launcher) const;

  std::shared_ptr<SharedLayer> shared_;
  // Not empty.
  std::vector<std::unique_ptr<Launcher>> launchers_;
};

}  // namespace dynamo_moe
