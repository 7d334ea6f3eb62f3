// What is in a bundle, as JSON. docs/reference/bundle.md describes the text.
#pragma once

#include <string>

#include "bundle/bundle.h"

namespace dynamo_moe {

std::string DescribeBundle(const Bundle& bundle);

}  // namespace dynamo_moe
