// A layer's attributes, as TensorRT passes them on from the nodes of an ONNX file.
#pragma once

#include <cstdint>
#include <string>

#include "bundle/layer.h"
#include "node/attributes.h"
#include "node/node.h"
#include "plugin/tensorrt_abi.h"
#include "status.h"

namespace dynamo_moe::plugin {

// Beside that of a version.
using dynamo_moe::NameOf;

// A plugin's version. TensorRT's parser warns of each field that a node lacks, so there are further
// versions with the fields that most nodes lack: of offloaded layers, of rare options, of both.
struct Version {
  bool offloaded;
  bool rare;
};
// In the order of their names, "1" to "4".
inline constexpr Version kVersions[] = {{false, false}, {true, false}, {false, true}, {true, true}};
// In TensorRT's registry, and in the attribute plugin_version.
const char* NameOf(Version version);
Version VersionOf(const dynamo_moe_layer& layer);

struct Attributes {
  // Without what follows from the inputs and the bundle.
  dynamo_moe_layer layer = {};
  // The bundle's path; empty if it is not given.
  std::string kernels;
  // Empty where all experts are resident.
  Offload offload;
};

// A plugin's attributes. TensorRT's parser passes no others.
nvinfer1::PluginFieldCollection AttributeFields(const Node& node, Version version);

// Checks every field: one that is missing, unknown, given twice, of the wrong type or out of range
// is an error.
Status ReadAttributes(const Node& node, Version version,
                      const nvinfer1::PluginFieldCollection& fields, Attributes* attributes);

// The text of a field of type CHAR, with or without a terminator.
std::string TextOf(const nvinfer1::PluginField& field);

}  // namespace dynamo_moe::plugin
