// Descriptors for the tensor memory accelerator, as the driver encodes them.
#pragma once

#include "bundle/format.h"
#include "launch/driver.h"
#include "status.h"

namespace dynamo_moe {

// Encodes the map of a tensor at an address.
Status EncodeTensorMap(const cuda::Driver& driver, const format::TensorMap& record,
                       const void* address, cuda::TensorMap* map);

}  // namespace dynamo_moe
