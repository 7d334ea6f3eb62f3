// Descriptors for the tensor memory accelerator, as the driver encodes them.
#pragma once

#include <cstddef>
#include <mutex>
#include <vector>

#include "bundle/bundle.h"
#include "launch/driver.h"
#include "status.h"

namespace dynamo_moe {

// A program's tensor maps, each encoded for the address that it was last asked for.
class TensorMaps {
 public:
  explicit TensorMaps(const Program& program)
      : program_(program), encoded_(program.tensor_maps().size()) {}

  // The map number `index` of what lies at an address.
  Status Encode(const cuda::Driver& driver, std::size_t index, const void* address,
                cuda::TensorMap* map);

 private:
  struct Encoded {
    const void* address = nullptr;
    cuda::TensorMap map = {};
  };

  const Program& program_;
  std::mutex encoding_;
  std::vector<Encoded> encoded_;
};

}  // namespace dynamo_moe
