// The kernels of a layer, for one or more architectures, and the cache of an offloaded one.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "dynamo_moe.h"
#include "node/attributes.h"
#include "status.h"

namespace dynamo_moe {

class Cache;

// A layer's opened programs, one for each architecture. The launcher keeps and loads equal ones
// once.
class Kernels {
 public:
  // From a bundle whose programs are all of one layer.
  static Status Open(std::string_view bundle, std::shared_ptr<const Kernels>* kernels);
  // Those that another layer has opened; null if none has.
  static Status Find(const dynamo_moe_key& key, std::shared_ptr<const Kernels>* kernels);

  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  ~Kernels() { dynamo_moe_program_close(program_); }

  // Loads them into the current context, if there is one.
  Status Prepare() const;
  // The workspace in bytes for up to so many tokens, wherever it begins.
  Status WorkspaceSize(std::int64_t most_tokens, std::size_t* bytes) const;
  // Enqueues the layer on a stream (a CUstream), with a workspace of that size. An offloaded layer
  // has a cache, others have null.
  Status Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                 void* stream, Cache* cache) const;

  dynamo_moe_program* program() const { return program_; }
  const dynamo_moe_layer& layer() const { return layer_; }
  std::string_view bytes() const { return bytes_; }
  const dynamo_moe_key& key() const { return key_; }

 private:
  Kernels() = default;

  // Reads what the opened programs say of themselves.
  Status Describe();

  dynamo_moe_program* program_ = nullptr;
  dynamo_moe_layer layer_ = {};
  dynamo_moe_key key_ = {};
  std::string_view bytes_;
};

// A cache of a layer's experts on a device.
class Cache {
 public:
  // Checks the experts' files.
  static Status Open(const Kernels& kernels, const Offload& offload, std::shared_ptr<Cache>* cache);

  Cache(const Cache&) = delete;
  Cache& operator=(const Cache&) = delete;
  ~Cache() { dynamo_moe_cache_close(cache_); }

  // Allocates it in the current context, and loads the kernels.
  Status Prepare() const;

  dynamo_moe_cache* get() const { return cache_; }
  // What a logger should be told; each text once, then "". The user is a context, or a stream.
  std::string TakeSummary(const char* user);
  std::string TakeWarning();

 private:
  Cache() = default;

  dynamo_moe_cache* cache_ = nullptr;
  std::string summary_;
  bool shared_ = false;
  std::atomic<bool> summary_taken_ = false;
  std::atomic<bool> warning_taken_ = false;
};

}  // namespace dynamo_moe
