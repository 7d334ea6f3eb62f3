// What is in a bundle, as JSON. docs/reference/bundle.md describes the text.
#pragma once

#include <string>

#include "bundle/bundle.h"
#include "status.h"

namespace dynamo_moe {

// Parses every program.
Status DescribeBundle(const Bundle& bundle, std::string* json);

}  // namespace dynamo_moe
