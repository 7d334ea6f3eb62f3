// Launches a program's kernels for a number of tokens.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

#include "launch/modules.h"

namespace dynamo_moe {

// A program as one layer uses it: the part shared with equal programs, and maps of its own weights.
class Launcher {
 public:
  static Status Open(const void* data, std::size_t size, std::unique_ptr<Launcher>* launcher);

  const Program& program() const { return shared_->program(); }

  Status WorkspaceSize(std::int64_t max_tokens, std::size_t* bytes) const;
  Status Prepare();
  Status Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                 std::size_t workspace_size, cuda::Stream stream);

 private:
  struct EncodedMap {
    const void* address = nullptr;
    cuda::TensorMap map = {};
  };
  class Call;

  explicit Launcher(std::shared_ptr<SharedProgram> shared);

  // The map of a tensor at an address; encodes it again if the address has changed.
  Status Encode(const cuda::Driver& driver, std::size_t index, const void* address,
                cuda::TensorMap* map);

  std::shared_ptr<SharedProgram> shared_;
  std::mutex encoding_;
  std::vector<EncodedMap> maps_;
};

}  // namespace dynamo_moe
