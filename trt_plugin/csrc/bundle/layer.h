// The layer record: its codes, their names, and which values it may have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "bundle/format.h"
#include "dynamo_moe.h"
#include "status.h"

namespace dynamo_moe::format {

enum Operator : std::uint32_t { kDropless, kExpertsOnly, kOperators };

enum DataType : std::uint32_t { kNone, kFloat32, kFloat16, kBfloat16, kI32, kI64, kI8 };

enum GroupScoring : std::uint32_t { kNoGroups, kMax, kTop2Sum, kGroupScorings };

// A size of a layer: its name in a record, the attribute of a node, its word in the record.
struct Size {
  const char* name;
  const char* attribute;
  std::uint32_t word;
};

// An option of a layer.
struct Option {
  enum Type : std::uint32_t { kBool, kName, kInt, kFloat };

  const char* name;       // In a record.
  const char* attribute;  // Of a node, and so the plugin's field.
  bool router;            // DroplessMoEExperts does not have it.
  bool plain;             // Nodes whose weights are packed do not have it.
  bool rare;              // Nodes have it if they set one such option.
  Type type;
  std::uint32_t word;  // Its place in a record,
  std::uint32_t bit;   // and there; 0: the whole word.
  const char* const* names;
  std::uint32_t count;  // Of names; a name's place is its code.
  float initial;        // Its default: a number, or a code.
  const char* rule;     // What a number must be; null: finite.
  float least;
  std::int32_t only_with;  // It has an effect with certain codes of this option; -1: always.
  std::uint32_t codes;     // These codes as bits.
};

// A way to store w1 and w2: as they are, or packed, which are bytes with scales.
struct WeightFormat {
  const char* name;
  std::uint32_t values;       // Their dtype.
  std::uint32_t per_element;  // Columns of a row that an element of the values holds.
  std::uint32_t scales;       // A bit for each dtype that the scales may have; 0: there are none.
  bool has_zero_points;       // Whether there may be some.
  bool has_global_scales;     // Whether each row has a float32 that its scales are multiplied by.

  bool IsPacked() const { return scales != 0; }
};

enum ZeroPoints : std::uint32_t { kNoZeroPoints, kOneForEachScale, kOneForEachExpert, kZeroPoints };
inline constexpr const char* kZeroPointsNames[kZeroPoints] = {"none", "scales", "experts"};

#include "bundle/layer_table.inc"

constexpr bool IsGating(std::uint32_t activation) { return ((kGatings >> activation) & 1) != 0; }

}  // namespace dynamo_moe::format

namespace dynamo_moe {

std::uint32_t SizeOf(const dynamo_moe_layer& layer, const format::Size& size);

// An option's value in a record: 0 or 1, the code of its name, or an integer.
std::uint32_t CodeOf(const dynamo_moe_layer& layer, const format::Option& option);
// The same of a float.
float NumberOf(const dynamo_moe_layer& layer, const format::Option& option);
void SetCode(const format::Option& option, std::uint32_t code, dynamo_moe_layer* layer);
void SetNumber(const format::Option& option, float number, dynamo_moe_layer* layer);

// Whether an option has an effect beside the layer's others. Those that have none are 0.
bool HasEffect(const dynamo_moe_layer& layer, const format::Option& option);

// The format of weights that are stored as they are, of a dtype; 0 if there is none.
std::uint32_t PlainFormatOf(std::uint32_t dtype);
const format::WeightFormat& FormatOf(const dynamo_moe_layer& layer);
// How many blocks an expert's matrix has that share a scale, along its rows and columns.
std::uint64_t BlockRows(const dynamo_moe_layer& layer, std::uint64_t rows);
std::uint64_t BlockColumns(const dynamo_moe_layer& layer, std::uint64_t columns);

// A tensor that stores w1 or w2, of all experts.
struct StoredTensor {
  format::Tensor tensor;
  std::uint64_t bytes;
};
inline constexpr std::size_t kMaxStoredTensors = 8;
// Those of w1, its values first, and then those of w2; false if the bytes do not fit into 64 bits.
bool StoredTensors(const dynamo_moe_layer& layer, std::vector<StoredTensor>* tensors);
// The bytes of w1 and of w2; false if they do not fit.
bool WeightBytes(const dynamo_moe_layer& layer, std::uint64_t* w1, std::uint64_t* w2);

// Why a token cannot choose top_k experts of its groups; "" if it can, or if there are no groups.
std::string GroupsError(const dynamo_moe_layer& layer);

// Checks that kernels exist for such a layer, and that fields which do not apply to it are 0:
// records are compared as bytes.
Status CheckLayer(const dynamo_moe_layer& layer);

}  // namespace dynamo_moe
