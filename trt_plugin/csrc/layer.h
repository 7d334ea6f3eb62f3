// The layer record: which values it may have.
#pragma once

#include "dynamo_moe.h"
#include "status.h"

namespace dynamo_moe {

// Whether kernels exist for such a layer, and nothing is set that does not apply to it: records
// are compared as bytes.
Status CheckLayer(const dynamo_moe_layer& layer);

}  // namespace dynamo_moe
