// What is in a bundle, as JSON. docs/reference/bundle.md describes the text.
#pragma once

#include <string>

#include "bundle/bundle.h"

namespace dynamo_moe {

// A layer in words, without the numbers that do not apply to it. The layer must have been checked.
std::string DescribeLayer(const dynamo_moe_layer& layer);

std::string DescribeBundle(const Bundle& bundle);

}  // namespace dynamo_moe
