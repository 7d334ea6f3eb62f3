// The driver reads an image without being told its size: what it follows must lie within.
#pragma once

#include <cstddef>

#include "status.h"

namespace dynamo_moe {

// Checks that an image is an ELF file of CUDA's, whose tables and sections lie within it.
Status CheckImage(const void* image, std::size_t size);

}  // namespace dynamo_moe
