// The nodes of a layer: their names, inputs, shapes and attributes, whatever runtime reads them.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "bundle/format.h"
#include "bundle/layer.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

// A kind of node: an operator, whose weights are as they are, or packed.
struct Node {
  format::Operator op;
  bool packed;
};
// Its name in ONNX, and in TensorRT's registry.
const char* NameOf(const Node& node);
Node NodeOf(const dynamo_moe_layer& layer);

inline constexpr std::int32_t kMaxInputs = 14;

// The tensors in the order of the node's inputs. Optional ones come last.
Span<format::Tensor> InputsOf(const Node& node);
std::size_t RequiredInputs(const Node& node);
bool IsOptional(format::Tensor tensor);
bool IsZeroPoints(format::Tensor tensor);
// Whether nodes may have a tensor that their format has no use for, so that biases can come behind.
bool IsIgnored(const dynamo_moe_layer& layer, format::Tensor tensor);

const char* NameOf(format::Tensor tensor);
const char* DtypeName(std::uint32_t code);
// A bit for each dtype that a tensor may have.
std::uint32_t DtypesOf(const dynamo_moe_layer& layer, format::Tensor tensor);

// A weight's shape. Tensors of tokens may have any number of dimensions before their last.
struct Shape {
  std::int64_t sizes[3];
  std::int32_t rank;
};
// Rank 0 for tensors of tokens.
Shape ShapeOf(const dynamo_moe_layer& layer, format::Tensor tensor);

bool HasFlag(const dynamo_moe_layer& layer, std::uint32_t flag);

// Attributes of packed nodes: how the weights are stored, and the columns and rows that share a
// scale; 0: all.
inline constexpr const char* kWeightFormat = "weight_format";
inline constexpr const char* kBlockSize = "block_size";
inline constexpr const char* kBlockRows = "block_rows";
// The code of a format by its name.
Status ReadPackedFormat(const std::string& given, std::uint32_t* weight_format);

// Whether nodes of this kind have an option's attribute.
bool HasOption(const Node& node, const format::Option& option);
// Checks an attribute that is a float.
Status CheckNumber(const format::Option& option, float number);
// The code of an attribute that is a name.
Status ReadName(const format::Option& option, const std::string& given, std::uint32_t* code);
// Checks what a layer's options must be together, and sets those without effect to 0.
Status CompleteOptions(dynamo_moe_layer* layer);

// A field's text for a message: without control characters, and cut to a length.
std::string Printable(std::string_view text, std::size_t longest = 64);

}  // namespace dynamo_moe
