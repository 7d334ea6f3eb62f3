// Descriptors for the tensor memory accelerator: what a bundle says of them, and how the driver
// encodes them.
#pragma once

#include "driver.h"
#include "format.h"
#include "status.h"

namespace dynamo_moe {

// Whether a record is one that cuTensorMapEncodeTiled takes.
Status CheckTensorMap(const format::TensorMap& record);

// Encodes the map of a tensor at an address.
Status EncodeTensorMap(const cuda::Driver& driver, const format::TensorMap& record,
                       const void* address, cuda::TensorMap* map);

}  // namespace dynamo_moe
