// A program's kernels, loaded into the CUDA contexts that use it.
#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/bundle.h"
#include "launch/driver.h"
#include "status.h"

namespace dynamo_moe {

// A context, and its number, which no later context gets: 0 with drivers older than CUDA 12.
struct ContextIdentity {
  cuda::Context handle = nullptr;
  unsigned long long id = 0;

  bool operator==(const ContextIdentity& other) const {
    return handle == other.handle && id == other.id;
  }
};

// The calling thread's current context; null if it has none.
Status FindContext(const cuda::Driver& driver, cuda::Context* context);

// The same; having none is an error.
Status CurrentContext(const cuda::Driver& driver, ContextIdentity* context);

// Makes a context current, to release what it has; false where it no longer exists.
bool EnterIfAlive(const cuda::Driver& driver, const ContextIdentity& context,
                  cuda::ScopedContext* scope);

// An attribute, a CUdevice_attribute, of the current context's device.
Status DeviceAttribute(const cuda::Driver& driver, int attribute, int* value);

// The architecture of the current context's device: 90 for sm_90. Each thread remembers that of the
// context for which it asked last.
Status ArchitectureOf(const cuda::Driver& driver, const ContextIdentity& current,
                      std::uint32_t* architecture);

// The kernels in one context, in the program's order. The destructor unloads them.
class LoadedKernels {
 public:
  LoadedKernels(const cuda::Driver& driver, const ContextIdentity& context)
      : driver_(driver), context_(context) {}
  LoadedKernels(const LoadedKernels&) = delete;
  LoadedKernels& operator=(const LoadedKernels&) = delete;
  ~LoadedKernels();

  // Loads into the context, which must be the current one.
  Status Load(const Program& program);

  const ContextIdentity& context() const { return context_; }
  cuda::Function function(std::size_t kernel) const { return functions_[kernel]; }

 private:
  Status LoadKernel(const Program& program, const format::Kernel& kernel, int shared_limit);

  const cuda::Driver& driver_;
  ContextIdentity context_;
  std::vector<cuda::Module> modules_;
  std::vector<cuda::Function> functions_;
};

// A program and its kernels; handles of equal programs share one.
class SharedProgram {
 public:
  // The owner's memory has the bytes, in which they are aligned.
  Status Read(std::string_view bytes, std::shared_ptr<const std::string> owner);

  const Program& program() const { return program_; }
  std::string_view bytes() const { return program_.bytes(); }

  // The kernels in the current context; loads them if necessary.
  Status Kernels(const cuda::Driver& driver, const ContextIdentity& current,
                 std::shared_ptr<const LoadedKernels>* kernels);

 private:
  std::shared_ptr<const LoadedKernels> Find(const ContextIdentity& context) const;

  Program program_;
  // Held while kernels are loaded. Looking up loaded kernels does not wait for it.
  std::mutex loading_;
  mutable std::shared_mutex finding_;
  // At most one for each context's address.
  std::vector<std::shared_ptr<const LoadedKernels>> loaded_;
};

}  // namespace dynamo_moe
