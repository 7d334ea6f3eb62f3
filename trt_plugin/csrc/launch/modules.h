// A program's kernels, loaded into the CUDA contexts that use it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <vector>

#include "bundle/bundle.h"
#include "launch/driver.h"
#include "status.h"

namespace dynamo_moe {

// The calling thread's current context; null if it has none.
Status FindContext(const cuda::Driver& driver, cuda::Context* context);

// The architecture of the current context's device, or of the only device if no context is current:
// 90 for sm_90.
Status CurrentArchitecture(const cuda::Driver& driver, std::uint32_t* architecture);

// The kernels in one context, in the program's order. The destructor unloads them.
class LoadedKernels {
 public:
  LoadedKernels(const cuda::Driver& driver, cuda::Context context, unsigned long long context_id)
      : driver_(driver), context_(context), context_id_(context_id) {}
  LoadedKernels(const LoadedKernels&) = delete;
  LoadedKernels& operator=(const LoadedKernels&) = delete;
  ~LoadedKernels();

  // Loads into the context, which must be the current one.
  Status Load(const Program& program);

  bool IsFor(cuda::Context context, unsigned long long context_id) const {
    return context_ == context && context_id_ == context_id;
  }
  bool IsAt(cuda::Context context) const { return context_ == context; }
  cuda::Function function(std::size_t kernel) const { return functions_[kernel]; }

 private:
  Status LoadKernel(const Program& program, const format::Kernel& kernel, int shared_limit);

  const cuda::Driver& driver_;
  cuda::Context context_;
  unsigned long long context_id_;
  std::vector<cuda::Module> modules_;
  std::vector<cuda::Function> functions_;
};

// A program and its kernels; handles of equal programs share one.
class SharedProgram {
 public:
  // Finds the program among those in use, or reads it.
  static Status Open(const void* data, std::size_t size, std::shared_ptr<SharedProgram>* shared);

  const Program& program() const { return program_; }

  // The kernels in the current context; loads them if necessary.
  Status Kernels(const cuda::Driver& driver, std::shared_ptr<const LoadedKernels>* kernels);

 private:
  std::shared_ptr<const LoadedKernels> Find(cuda::Context context,
                                            unsigned long long context_id) const;

  Program program_;
  // Held while kernels are loaded. Looking up loaded kernels does not wait for it.
  std::mutex loading_;
  mutable std::shared_mutex finding_;
  // At most one for each context's address.
  std::vector<std::shared_ptr<const LoadedKernels>> loaded_;
};

}  // namespace dynamo_moe
