// Decodes random packed matrices of many sizes, whose memory ends where they end, and multiplies
// them with some rows, packed and decoded: all must agree. Sanitizers see what is read.
#include "onnxruntime/packed_matrix.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <memory>
#include <random>
#include <vector>

#include "bundle/layer.h"
#include "onnxruntime/few_rows.h"

namespace {

using dynamo_moe::onnxruntime::PackedMatrix;
namespace format = dynamo_moe::format;
namespace ort = dynamo_moe::onnxruntime;

constexpr std::uint32_t kFirstPacked = 4;
constexpr std::uint32_t kFormats = 9;

struct Random {
  std::mt19937 engine{1};
  std::int64_t operator()(std::int64_t least, std::int64_t most) {
    return std::uniform_int_distribution<std::int64_t>(least, most)(engine);
  }
};

// Memory of exactly so many bytes, none of which makes a NaN of a scale or a number.
std::unique_ptr<std::uint8_t[]> Bytes(Random& random, std::int64_t count, std::int64_t most) {
  std::unique_ptr<std::uint8_t[]> bytes(new std::uint8_t[static_cast<std::size_t>(count)]);
  for (std::int64_t i = 0; i < count; ++i) {
    bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(random(0, most));
  }
  return bytes;
}

bool Agrees(Random& random, std::uint32_t weight_format) {
  const format::WeightFormat& weights = format::kWeightFormats[weight_format];
  PackedMatrix matrix = {};
  matrix.weight_format = weight_format;
  matrix.rows = random(1, 14);
  matrix.columns = random(1, 70) * weights.per_element;
  matrix.block_rows = random(1, 3);
  const std::int64_t blocks_of[] = {random(1, 80), 16, 32, matrix.columns};
  matrix.block_columns = blocks_of[random(0, 3)];
  const std::int64_t blocks = (matrix.rows + matrix.block_rows - 1) / matrix.block_rows *
                              ((matrix.columns + matrix.block_columns - 1) / matrix.block_columns);
  const std::uint32_t floats[] = {format::kFloat32, format::kFloat16, format::kBfloat16};
  matrix.scales_dtype =
      (weights.scales & 1U << format::kI8) != 0 ? format::kI8 : floats[random(0, 2)];
  const auto values = Bytes(random, matrix.rows * matrix.columns / weights.per_element, 126);
  const auto scales = Bytes(random, blocks * format::kDataTypeBytes[matrix.scales_dtype], 60);
  const auto zero_points = Bytes(random, blocks, 15);
  const std::vector<float> global(static_cast<std::size_t>(matrix.rows), 0.75F);
  matrix.values = values.get();
  matrix.scales = scales.get();
  if (weights.has_zero_points && random(0, 1) == 1) {
    matrix.zero_points = reinterpret_cast<const std::int8_t*>(zero_points.get());
    matrix.one_zero_point = random(0, 1) == 1;
  }
  matrix.global_scales = weights.has_global_scales ? global.data() : nullptr;

  const auto columns = static_cast<std::size_t>(matrix.columns);
  const auto rows = static_cast<std::size_t>(matrix.rows);
  const std::unique_ptr<float[]> decoded(new float[rows * columns]);
  const std::int64_t part = random(0, matrix.rows);
  ort::Decode(matrix, 0, part, decoded.get());
  ort::Decode(matrix, part, matrix.rows - part, decoded.get() + part * matrix.columns);
  const std::int64_t count = random(1, 13);
  const std::int64_t packed = std::min(count, ort::kMostRowsInRegisters);
  std::vector<float> others(static_cast<std::size_t>(count) * columns);
  for (float& other : others) {
    other = static_cast<float>(random(-9, 9));
  }
  const std::size_t numbers = static_cast<std::size_t>(count) * rows;
  const std::size_t packed_numbers = static_cast<std::size_t>(packed) * rows;
  const std::unique_ptr<float[]> result(new float[packed_numbers]);
  const std::unique_ptr<float[]> of_decoded(new float[numbers]);
  ort::MultiplyFewRows(matrix, nullptr, others.data(), packed, result.get());
  // In the two parts that were decoded.
  ort::MultiplyFewRows(decoded.get(), part, matrix.columns, nullptr, others.data(), count,
                       of_decoded.get(), matrix.rows);
  ort::MultiplyFewRows(decoded.get() + part * matrix.columns, matrix.rows - part, matrix.columns,
                       nullptr, others.data(), count, of_decoded.get() + part, matrix.rows);
  for (std::size_t i = 0; i < numbers; ++i) {
    double sum = 0;
    double most = 0;
    for (std::size_t column = 0; column < columns; ++column) {
      const double number = decoded[i % rows * columns + column];
      const double other = others[i / rows * columns + column];
      sum += number * other;
      most += std::abs(number * other);
    }
    for (const float* const product : {i < packed_numbers ? &result[i] : nullptr, &of_decoded[i]}) {
      if (product != nullptr && !(std::abs(sum - static_cast<double>(*product)) <= 1e-5 * most)) {
        std::printf(
            "format %s, %lld columns in blocks of %lld, %s: %g, not %g\n", weights.name,
            static_cast<long long>(matrix.columns), static_cast<long long>(matrix.block_columns),
            product == &of_decoded[i] ? "decoded" : "packed", static_cast<double>(*product), sum);
        return false;
      }
    }
  }
  return true;
}

}  // namespace

int main() {
  Random random;
  int checked = 0;
  for (int turn = 0; turn < 400; ++turn) {
    for (std::uint32_t weight_format = kFirstPacked; weight_format < kFormats; ++weight_format) {
      if (!Agrees(random, weight_format)) {
        return 1;
      }
      ++checked;
    }
  }
  std::printf("%d matrices\n", checked);
  return 0;
}
