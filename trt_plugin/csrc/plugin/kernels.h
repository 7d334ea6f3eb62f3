// The kernels that a plugin runs. They are looked up in a bundle when an engine is built, and
// stored in the engine.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/bundle.h"
#include "dynamo_moe.h"
#include "status.h"

namespace dynamo_moe::plugin {

// An opened program. The launcher keeps and loads equal programs once.
class Kernels {
 public:
  static Status Open(const void* data, std::size_t size, std::shared_ptr<const Kernels>* kernels);

  Kernels(const Kernels&) = delete;
  Kernels& operator=(const Kernels&) = delete;
  ~Kernels() { dynamo_moe_program_close(program_); }

  dynamo_moe_program* program() const { return program_; }
  const dynamo_moe_layer& layer() const { return layer_; }
  std::string_view bytes() const { return bytes_; }
  std::uint32_t checksum() const;

 private:
  Kernels() = default;

  dynamo_moe_program* program_ = nullptr;
  dynamo_moe_layer layer_ = {};
  std::string_view bytes_;
};

// A bundle's file in memory; plugins that use the same file share one.
class BundleFile {
 public:
  // Opens the bundle at a path. If that is empty, opens the one that the environment variable
  // DYNAMO_MOE_KERNELS names, or else dynamo_moe.moek beside this library.
  static Status Open(const std::string& path, std::shared_ptr<BundleFile>* bundle);

  const std::string& path() const { return path_; }
  // The whole file's checksum.
  std::uint32_t checksum() const;
  const std::vector<dynamo_moe::Bundle::Entry>& programs() const { return content_.programs(); }

  // The bytes of the layer's program for an architecture. They lie in the bundle.
  Status Find(const dynamo_moe_layer& layer, std::uint32_t architecture,
              std::string_view* program) const;

 private:
  Status Read(std::size_t size);

  std::string path_;
  std::string bytes_;
  dynamo_moe::Bundle content_;
};

}  // namespace dynamo_moe::plugin
