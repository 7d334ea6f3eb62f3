// TensorRT's descriptions of a layer's inputs and of y, as those of a node's call.
#pragma once

#include <cstdint>

#include "node/inputs.h"
#include "plugin/tensorrt_abi.h"
#include "status.h"

namespace dynamo_moe::plugin {

// 0 for types that the kernels do not take.
std::uint32_t DtypeCode(nvinfer1::DataType type);

// x as the kernels count its tokens.
TensorDescription DescriptionOf(const nvinfer1::Dims& dims, nvinfer1::DataType type);

// Checks the counts and formats, and gathers what TensorRT passes as arrays of either kind of
// description.
Status MakeCall(const Node& node, const nvinfer1::PluginTensorDesc* in, std::int32_t inputs,
                const nvinfer1::PluginTensorDesc* out, std::int32_t outputs, NodeCall* call);
Status MakeCall(const Node& node, const nvinfer1::DynamicPluginTensorDesc* in, std::int32_t inputs,
                const nvinfer1::DynamicPluginTensorDesc* out, std::int32_t outputs, NodeCall* call);

// The same for inputs and y in one array, which TensorRT has filled in up to a position, in
// whatever formats.
Status MakeCallUpTo(std::int32_t position, const Node& node,
                    const nvinfer1::DynamicPluginTensorDesc* in_out, std::int32_t inputs,
                    std::int32_t outputs, NodeCall* call);

}  // namespace dynamo_moe::plugin
