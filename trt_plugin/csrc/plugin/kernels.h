// The kernels that a plugin runs, for one or more architectures. They are looked up in a bundle
// when an engine is built, and stored in the engine.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/bundle.h"
#include "dynamo_moe.h"
#include "plugin/attributes.h"
#include "status.h"

namespace dynamo_moe::plugin {

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

  dynamo_moe_cache* get() const { return cache_; }
  // What the logger should be told; each text once, then "".
  std::string TakeSummary();
  std::string TakeWarning();

 private:
  Cache() = default;

  dynamo_moe_cache* cache_ = nullptr;
  std::string summary_;
  std::atomic<bool> summary_taken_ = false;
  std::atomic<bool> warning_taken_ = false;
};

// Architectures as numbers: 90 for sm_90.
using Architectures = std::vector<std::uint32_t>;

// Those that the environment variable DYNAMO_MOE_ARCHITECTURES names, such as "sm_89,sm_120"; empty
// if it names none.
Status ReadArchitectures(Architectures* names);

// A bundle's file in memory; plugins that use the same file share one.
class BundleFile {
 public:
  // A bundle that is in memory already, by the name that stands for its path.
  static Status FromBytes(std::string name, std::string_view bytes,
                          std::shared_ptr<BundleFile>* bundle);

  // Gives the layers that this thread creates from now on their kernels; null: no longer.
  static void Give(std::shared_ptr<BundleFile> bundle);
  // What this thread's layers are given; null if the environment decides.
  static std::shared_ptr<BundleFile> Given();

  // Opens the bundle at a path. If that is empty, opens the one that the environment variable
  // DYNAMO_MOE_KERNELS names, or else dynamo_moe.moek beside this library.
  static Status Open(const std::string& path, std::shared_ptr<BundleFile>* bundle);

  const std::string& path() const { return path_; }
  // The whole file's checksum.
  std::uint32_t checksum() const;
  const std::vector<dynamo_moe::Bundle::Entry>& programs() const { return content_.programs(); }

  // The programs of layers, of which each architecture's first counts. With names, only those
  // architectures; one that is missing is an error. No program at all is none.
  Status Select(const Architectures& names,
                const std::function<bool(const dynamo_moe_layer&)>& wanted,
                std::vector<std::string_view>* programs) const;

 private:
  Status Read(std::size_t size);
  Status Parse();

  std::string path_;
  std::string bytes_;
  dynamo_moe::Bundle content_;
};

}  // namespace dynamo_moe::plugin
