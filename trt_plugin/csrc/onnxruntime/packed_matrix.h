// An expert's matrix that is packed: codes with scales, which become numbers row by row.
#pragma once

#include <cstdint>

namespace dynamo_moe::onnxruntime {

struct PackedMatrix {
  std::uint32_t weight_format;  // A place in format::kWeightFormats.
  std::uint32_t scales_dtype;
  std::int64_t rows;
  std::int64_t columns;
  std::int64_t block_rows;     // So many rows
  std::int64_t block_columns;  // and columns share a scale.
  const std::uint8_t* values;
  const void* scales;
  const std::int8_t* zero_points;  // Null: the format's own.
  bool one_zero_point;             // Not one for each scale.
  const float* global_scales;      // A row's; null where the format has none.
};

// Writes some rows in float32.
void Decode(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows, float* result);

inline constexpr std::int64_t kMostRowsInRegisters = 4;

// result[r, o] = sum over i of matrix[o, i] * rows[r, i] + bias[o], for up to kMostRowsInRegisters
// rows; the bias may be null. A code is decoded once, in registers.
void MultiplyFewRows(const PackedMatrix& matrix, const float* bias, const float* rows,
                     std::int64_t count, float* result);

}  // namespace dynamo_moe::onnxruntime
