// A layer's attributes, as the nodes of an ONNX file have them and TensorRT passes them on.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "format.h"
#include "status.h"
#include "tensorrt_abi.h"

namespace dynamo_moe::plugin {

// The operator's name in ONNX and in TensorRT's registry.
const char* NameOf(format::Operator op);

struct Attributes {
  // What does not apply is 0, as in a bundle. dtypes, biases and tf32 are 0: inputs and bundle tell
  // them.
  dynamo_moe_layer layer = {};
  // The bundle's path; empty if it is not given.
  std::string kernels;
};

// A layer's attributes in words, for the engine inspector and the timing cache.
std::string Describe(const dynamo_moe_layer& layer);

// The attributes that an operator has, for the parser, which passes no others.
const nvinfer1::PluginFieldCollection& AttributeFields(format::Operator op);

// Checks all: what is missing, unknown, given twice, of the wrong type or out of range is an error.
Status ReadAttributes(format::Operator op, const nvinfer1::PluginFieldCollection& fields,
                      Attributes* attributes);

// Fields have no terminated strings; messages and logs no control characters.
std::string Printable(std::string_view text, std::size_t longest = 64);

}  // namespace dynamo_moe::plugin
