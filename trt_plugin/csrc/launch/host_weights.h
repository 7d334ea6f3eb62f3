// Experts' weights in host memory that the device reads: a tensor of a safetensors file, mapped and
// pinned where it lies.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

#include "launch/driver.h"
#include "launch/modules.h"
#include "status.h"

namespace dynamo_moe {

// Where a tensor's bytes lie, and what tells that the file is still the one that was meant.
struct WeightsSource {
  std::uint64_t offset = 0;
  std::uint64_t bytes = 0;
  std::uint64_t file_bytes = 0;
  // The file's first bytes, a length and a JSON text, with their CRC-32.
  std::uint64_t header_bytes = 0;
  std::uint32_t header_checksum = 0;
  std::string path;

  // Reads the numbers, the checksum in 8 hexadecimal digits and the path, separated by spaces.
  static Status Parse(std::string_view text, WeightsSource* source);
  // Finds the file, in the folder that the environment variable DYNAMO_MOE_WEIGHTS names or else at
  // its path, and checks it.
  Status Check() const;
};

// A tensor's bytes in one context; those who use the same bytes share one.
class HostWeights {
 public:
  // Needs the context to be current.
  static Status Open(const cuda::Driver& driver, const cuda::OffloadDriver& offload,
                     const ContextIdentity& current, const WeightsSource& source,
                     std::shared_ptr<const HostWeights>* weights);

  HostWeights(const HostWeights&) = delete;
  HostWeights& operator=(const HostWeights&) = delete;
  ~HostWeights();

  // The device's address, a multiple of 16.
  const void* address() const { return address_; }
  // Why the bytes are a copy, and what to do; empty if the file's own pages are pinned.
  const std::string& note() const { return note_; }

 private:
  HostWeights(const cuda::Driver& driver, const cuda::OffloadDriver& offload,
              const ContextIdentity& context)
      : driver_(driver), offload_(offload), context_(context) {}

  // Pins the file's pages. A failure leaves nothing behind.
  Status Map(int file, const WeightsSource& source);
  Status Copy(int file, const std::string& path, const WeightsSource& source);
  void Unmap();

  const cuda::Driver& driver_;
  const cuda::OffloadDriver& offload_;
  const ContextIdentity context_;
  cuda::Address address_ = nullptr;
  std::string note_;
  // The file's pages, or else a copy.
  void* pages_ = nullptr;
  std::size_t pages_bytes_ = 0;
  bool registered_ = false;
  void* copy_ = nullptr;
};

}  // namespace dynamo_moe
