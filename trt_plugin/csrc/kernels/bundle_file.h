// A bundle's file, and which of its architectures are wanted.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/bundle.h"
#include "status.h"

namespace dynamo_moe {

// Architectures as numbers: 90 for sm_90.
using Architectures = std::vector<std::uint32_t>;

// Those that the environment variable DYNAMO_MOE_ARCHITECTURES names, such as "sm_89,sm_120"; empty
// if it names none.
Status ReadArchitectures(Architectures* names);

// A bundle's file in memory; layers that use the same file share one.
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
  const std::vector<Bundle::Entry>& programs() const { return content_.programs(); }

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
  Bundle content_;
};

}  // namespace dynamo_moe
