#include "onnxruntime/packed_matrix.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "bundle/layer.h"
#include "onnxruntime/vectors.h"

namespace dynamo_moe::onnxruntime {
namespace {

// The packed ones of format::kWeightFormats.
enum : std::uint32_t { kInt4 = 4, kMxfp4, kFp8, kNvfp4, kInt8, kFormats };
static_assert(std::size(format::kWeightFormats) == kFormats);

constexpr float kInt4Zero = 8;

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> Numbers(const Integers<Lanes>& codes) {
  return __builtin_convertvector(codes, Floats<Lanes>);
}

struct Uint4 {
  static constexpr std::int64_t kPerByte = 2;
  template <std::int64_t Lanes>
  DYNAMO_MOE_INLINE static Floats<Lanes> Read(const Integers<Lanes>& codes) {
    return Numbers<Lanes>(codes);
  }
};

struct Int8 {
  static constexpr std::int64_t kPerByte = 1;
  template <std::int64_t Lanes>
  DYNAMO_MOE_INLINE static Floats<Lanes> Read(const Integers<Lanes>& codes) {
    return Numbers<Lanes>((codes ^ 128) - 128);
  }
};

// Two bits of an exponent and one of a mantissa: eight numbers with a sign.
struct E2m1 {
  static constexpr std::int64_t kPerByte = 2;
  template <std::int64_t Lanes>
  DYNAMO_MOE_INLINE static Floats<Lanes> Read(const Integers<Lanes>& codes) {
    constexpr Floats<Lanes> magnitudes = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
    const auto numbers = At<Lanes>(magnitudes, codes & 7);
    return BitsOf<Floats<Lanes>>(BitsOf<Integers<Lanes>>(numbers) | (codes & 8) << 28);
  }
};

// Four bits of an exponent and three of a mantissa; the last code is NaN.
struct E4m3 {
  static constexpr std::int64_t kPerByte = 1;
  template <std::int64_t Lanes>
  DYNAMO_MOE_INLINE static Floats<Lanes> Read(const Integers<Lanes>& codes) {
    const Integers<Lanes> magnitudes = codes & 127;
    const Integers<Lanes> normal = (magnitudes << 20) + (120 << 23);
    const auto small = BitsOf<Integers<Lanes>>(0x1p-9F * Numbers<Lanes>(magnitudes));
    const Integers<Lanes> finite = magnitudes < 8 ? small : normal;
    const Integers<Lanes> quiet_nan = (magnitudes == 127) & 0x7FC00000;
    return BitsOf<Floats<Lanes>>(finite | quiet_nan | (codes & 128) << 24);
  }
};

// The codes of a vector that begins with a byte; of four-bit ones in the last bits.
template <typename Code, std::int64_t Lanes>
DYNAMO_MOE_INLINE Integers<Lanes> CodesAt(const std::uint8_t* bytes) {
  if constexpr (Code::kPerByte == 1) {
    std::int32_t codes[Lanes];
    for (std::int64_t i = 0; i < Lanes; ++i) {
      codes[i] = bytes[i];
    }
    return BitsOf<Integers<Lanes>>(codes);
  } else if constexpr (Lanes == kLanes) {
    std::int32_t word = 0;
    std::memcpy(&word, bytes, sizeof(word));
    return (Integers<Lanes>{} + word) >> Integers<Lanes>{0, 4, 8, 12, 16, 20, 24, 28};
  } else {
    using Words [[gnu::vector_size(Lanes * sizeof(std::int32_t))]] = std::int64_t;
    std::int64_t words = 0;
    std::memcpy(&words, bytes, sizeof(words));
    constexpr Integers<Lanes> halves = {0, 0, 0, 0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1};
    constexpr Integers<Lanes> shifts = {0, 4, 8, 12, 16, 20, 24, 28, 0, 4, 8, 12, 16, 20, 24, 28};
    return __builtin_shuffle(BitsOf<Integers<Lanes>>(Words{} + words), halves) >> shifts;
  }
}

// Decodes a block, which has a scale and maybe a zero point.
template <typename Code, bool Zeros, std::int64_t Lanes>
class Decoder {
 public:
  DYNAMO_MOE_INLINE Decoder(float scale, float zero) : scale_(scale), zero_(zero) {
    if constexpr (kHasTable) {
      constexpr Integers<Lanes> all = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
      table_ = Decoded(all);
    }
  }

  DYNAMO_MOE_INLINE Floats<Lanes> Vector(const std::uint8_t* bytes) const {
    const auto codes = CodesAt<Code, Lanes>(bytes);
    if constexpr (kHasTable) {
      return At<Lanes>(table_, codes);
    } else {
      return Decoded(Code::kPerByte == 2 ? codes & 15 : codes);
    }
  }

  DYNAMO_MOE_INLINE float One(const std::uint8_t* row, std::int64_t column) const {
    const std::int32_t byte = row[column / Code::kPerByte];
    const std::int32_t code = Code::kPerByte == 1 ? byte : (byte >> (4 * (column % 2))) & 15;
    return Decoded(Integers<Lanes>{} + code)[0];
  }

 private:
  // All numbers of a block whose codes have four bits are in one vector.
  static constexpr bool kHasTable = Code::kPerByte == 2 && Lanes == kWideLanes;

  DYNAMO_MOE_INLINE Floats<Lanes> Decoded(const Integers<Lanes>& codes) const {
    const auto numbers = Code::template Read<Lanes>(codes);
    return (Zeros ? numbers - zero_ : numbers) * scale_;
  }

  float scale_;
  float zero_;
  Floats<Lanes> table_;
};

// A row of codes, of which each block has a scale and maybe a zero point.
template <typename Code, bool Zeros, std::int64_t Lanes>
struct Row {
  const std::uint8_t* codes;
  std::int64_t columns;
  std::int64_t block;
  const float* scales;
  const float* zeros;

  DYNAMO_MOE_INLINE Decoder<Code, Zeros, Lanes> DecoderOf(std::int64_t index) const {
    return {scales[index], Zeros ? zeros[index] : 0};
  }
  DYNAMO_MOE_INLINE const std::uint8_t* At(std::int64_t column) const {
    return codes + static_cast<std::uint64_t>(column) / Code::kPerByte;
  }
};

// Gives the numbers of some columns to a sink: two vectors at a time, one, and then the rest one by
// one. vector_at(column) and one_at(column) return them.
template <std::int64_t Lanes, typename VectorAt, typename OneAt, typename Sink>
DYNAMO_MOE_INLINE void ReadColumns(std::int64_t from, std::int64_t to, const VectorAt& vector_at,
                                   const OneAt& one_at, Sink* sink) {
  std::int64_t column = from;
  for (; column + 2 * Lanes <= to; column += 2 * Lanes) {
    sink->template Vector<0>(column, vector_at(column));
    sink->template Vector<1>(column + Lanes, vector_at(column + Lanes));
  }
  if (column + Lanes <= to) {
    sink->template Vector<0>(column, vector_at(column));
    column += Lanes;
  }
  for (; column < to; ++column) {
    sink->One(column, one_at(column));
  }
}

// A sink that multiplies a row with each of some others. An addition waits for the one before it,
// so there are two sums of each.
template <std::int64_t Count, std::int64_t Lanes>
struct Products {
  const float* others;
  std::int64_t columns;
  Floats<Lanes> sums[Count][2];
  float rest[Count];

  template <std::int64_t Turn>
  DYNAMO_MOE_INLINE void Vector(std::int64_t column, const Floats<Lanes>& numbers) {
    for (std::int64_t r = 0; r < Count; ++r) {
      sums[r][Turn] += numbers * Read<Lanes>(others + r * columns + column);
    }
  }
  DYNAMO_MOE_INLINE void One(std::int64_t column, float number) {
    for (std::int64_t r = 0; r < Count; ++r) {
      rest[r] += number * others[r * columns + column];
    }
  }
  // Writes them to a column of a matrix with so many.
  DYNAMO_MOE_INLINE void Write(const float* bias, std::int64_t column, std::int64_t width,
                               float* result) const {
    for (std::int64_t r = 0; r < Count; ++r) {
      const float sum = Sum<Lanes>(sums[r][0] + sums[r][1]) + rest[r];
      result[r * width + column] = sum + (bias == nullptr ? 0 : bias[column]);
    }
  }
};

// Takes a row's numbers from a column on, at which a block begins, a vector or one at a time.
template <typename Code, bool Zeros, std::int64_t Lanes, typename Sink>
DYNAMO_MOE_INLINE void ReadBlocks(const Row<Code, Zeros, Lanes>& row, std::int64_t from,
                                  Sink* sink) {
  for (std::int64_t index = from / row.block; from < row.columns; from += row.block, ++index) {
    const auto decoder = row.DecoderOf(index);
    const std::int64_t to = std::min(from + row.block, row.columns);
    const auto one_at = [&](std::int64_t column)
                            DYNAMO_MOE_INLINED { return decoder.One(row.codes, column); };
    // Vectors begin with a byte.
    const std::int64_t first = from + from % Code::kPerByte;
    if (first != from) {
      sink->One(from, one_at(from));
    }
    const auto vector_at = [&](std::int64_t column)
                               DYNAMO_MOE_INLINED { return decoder.Vector(row.At(column)); };
    ReadColumns<Lanes>(first, to, vector_at, one_at, sink);
  }
}

// The same for blocks of a size that the compiler makes use of, which whole vectors have.
template <std::int64_t Block, typename Code, bool Zeros, std::int64_t Lanes, typename Sink>
DYNAMO_MOE_INLINE void ReadEqualBlocks(const Row<Code, Zeros, Lanes>& row, Sink* sink) {
  static_assert(Block % Lanes == 0);
  constexpr std::int64_t turn = std::max(Block, 2 * Lanes);
  std::int64_t from = 0;
  for (std::int64_t index = 0; from + turn <= row.columns; from += turn, index += turn / Block) {
    const std::uint8_t* const codes = row.At(from);
#pragma GCC unroll 2
    for (std::int64_t column = 0; column < turn; column += 2 * Lanes) {
      const std::int64_t next = column + Lanes;
      sink->template Vector<0>(
          from + column,
          row.DecoderOf(index + column / Block).Vector(codes + column / Code::kPerByte));
      sink->template Vector<1>(
          from + next, row.DecoderOf(index + next / Block).Vector(codes + next / Code::kPerByte));
    }
  }
  ReadBlocks(row, from, sink);
}

template <typename Code, bool Zeros, std::int64_t Lanes, typename Sink>
DYNAMO_MOE_INLINE void ReadRow(const Row<Code, Zeros, Lanes>& row, Sink* sink) {
  if constexpr (Code::kPerByte == 2) {
    constexpr std::int64_t of_nvfp4 = 16;
    constexpr std::int64_t common = 32;
    if (row.block == of_nvfp4) {
      return ReadEqualBlocks<of_nvfp4>(row, sink);
    }
    if (row.block == common) {
      return ReadEqualBlocks<common>(row, sink);
    }
  }
  ReadBlocks(row, 0, sink);
}

// Writes a row.
template <std::int64_t Lanes>
struct Written {
  float* result;

  template <std::int64_t>
  DYNAMO_MOE_INLINE void Vector(std::int64_t column, const Floats<Lanes>& numbers) const {
    std::memcpy(result + column, &numbers, sizeof(numbers));
  }
  DYNAMO_MOE_INLINE void One(std::int64_t column, float number) const { result[column] = number; }
};

DYNAMO_MOE_INLINE float FromFloat16(std::uint16_t half) {
  const std::uint32_t magnitude = half & 0x7FFFU;
  const auto small = BitsOf<std::uint32_t>(0x1p-24F * static_cast<float>(half & 0x7FFF));
  std::uint32_t bits = (magnitude << 13) + (112U << 23);
  bits += magnitude >= 0x7C00 ? 112U << 23 : 0;  // Infinity and NaN.
  bits = magnitude < 0x400 ? small : bits;
  return BitsOf<float>(bits | (half & 0x8000U) << 16);
}

DYNAMO_MOE_INLINE float FromBfloat16(std::uint16_t half) {
  return BitsOf<float>(std::uint32_t{half} << 16);
}

// A power of two, of which the least is below the smallest normal number; the last code is NaN.
DYNAMO_MOE_INLINE float FromE8m0(std::uint8_t code) {
  const std::uint32_t ends = code == 0 || code == 255 ? 0x400000U : 0;
  return BitsOf<float>(std::uint32_t{code} << 23 | ends);
}

template <typename Stored, typename Read>
DYNAMO_MOE_INLINE void ReadNumbers(const void* stored, std::int64_t first, std::int64_t count,
                                   const Read& read, float* numbers) {
  const Stored* const from = static_cast<const Stored*>(stored) + first;
  for (std::int64_t i = 0; i < count; ++i) {
    numbers[i] = read(from[i]);
  }
}

// A row's scales, from the first of them on: where they lie, or a copy.
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE const float* ReadScales(const PackedMatrix& matrix, std::int64_t row,
                                          std::int64_t first, std::int64_t blocks, float* scales) {
  const void* const stored = matrix.scales;
  switch (matrix.scales_dtype) {
    case format::kFloat32:
      return static_cast<const float*>(stored) + first;
    case format::kFloat16:
      ReadNumbers<std::uint16_t>(stored, first, blocks, FromFloat16, scales);
      break;
    case format::kBfloat16:
      ReadNumbers<std::uint16_t>(stored, first, blocks, FromBfloat16, scales);
      break;
    default:
      if (matrix.weight_format == kMxfp4) {
        ReadNumbers<std::uint8_t>(stored, first, blocks, FromE8m0, scales);
      } else {
        const auto* const codes = static_cast<const std::uint8_t*>(stored) + first;
        const Written<Lanes> written = {scales};
        ReadRow(Row<E4m3, false, Lanes>{codes, blocks, blocks, matrix.global_scales + row, nullptr},
                &written);
      }
      break;
  }
  return scales;
}

// Whether there is a zero point for each scale.
DYNAMO_MOE_INLINE bool HasZeros(const PackedMatrix& matrix) {
  return matrix.zero_points != nullptr && !matrix.one_zero_point;
}

DYNAMO_MOE_INLINE void ReadZeros(const PackedMatrix& matrix, std::int64_t first,
                                 std::int64_t blocks, float* zeros) {
  if (HasZeros(matrix)) {
    ReadNumbers<std::int8_t>(
        matrix.zero_points, first, blocks,
        [](std::int8_t zero) { return static_cast<float>(zero); }, zeros);
  }
}

// Takes the numbers of some rows; make(row) returns what takes a row's, and done(row, sink)
// follows.
template <std::int64_t Lanes, typename Make, typename Done>
DYNAMO_MOE_INLINE void ReadRows(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows,
                                const Make& make, const Done& done) {
  const std::int64_t columns = matrix.columns;
  const std::int64_t block = matrix.block_columns;
  const std::int64_t blocks = (columns + block - 1) / block;
  const std::int64_t bytes = columns / format::kWeightFormats[matrix.weight_format].per_element;
  const float zero =
      matrix.zero_points == nullptr ? kInt4Zero : static_cast<float>(*matrix.zero_points);
  std::vector<float> copied_scales(static_cast<std::size_t>(blocks));
  std::vector<float> zeros(static_cast<std::size_t>(blocks), zero);
  for (std::int64_t row = first; row < first + rows; ++row) {
    const std::uint8_t* const codes = matrix.values + row * bytes;
    const std::int64_t first_block = row / matrix.block_rows * blocks;
    const float* const scales =
        ReadScales<Lanes>(matrix, row, first_block, blocks, copied_scales.data());
    auto sink = make(row);
    switch (matrix.weight_format) {
      case kInt4:
        ReadZeros(matrix, first_block, blocks, zeros.data());
        ReadRow(Row<Uint4, true, Lanes>{codes, columns, block, scales, zeros.data()}, &sink);
        break;
      case kInt8:
        ReadRow(Row<Int8, false, Lanes>{codes, columns, block, scales, nullptr}, &sink);
        break;
      case kFp8:
        ReadRow(Row<E4m3, false, Lanes>{codes, columns, block, scales, nullptr}, &sink);
        break;
      default:
        ReadRow(Row<E2m1, false, Lanes>{codes, columns, block, scales, nullptr}, &sink);
        break;
    }
    done(row, sink);
  }
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void DecodeBy(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows,
                                float* result) {
  const auto make = [&](std::int64_t row) DYNAMO_MOE_INLINED {
    return Written<Lanes>{result + (row - first) * matrix.columns};
  };
  ReadRows<Lanes>(matrix, first, rows, make,
                  [](std::int64_t, const Written<Lanes>&) DYNAMO_MOE_INLINED {});
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void MultiplyBy(const PackedMatrix& matrix, const float* bias, const float* rows,
                                  std::int64_t count, float* result) {
  WithCount<kMostRowsInRegisters>(count, [&](auto constant) DYNAMO_MOE_INLINED {
    constexpr std::int64_t fixed = constant();
    const auto make = [&](std::int64_t) DYNAMO_MOE_INLINED {
      return Products<fixed, Lanes>{rows, matrix.columns, {}, {}};
    };
    ReadRows<Lanes>(matrix, 0, matrix.rows, make,
                    [&](std::int64_t row, const auto& products)
                        DYNAMO_MOE_INLINED { products.Write(bias, row, matrix.rows, result); });
  });
}

}  // namespace

void Decode(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows, float* result) {
  ForCpu([&](auto lanes) DYNAMO_MOE_INLINED { DecodeBy<lanes()>(matrix, first, rows, result); });
}

void MultiplyFewRows(const PackedMatrix& matrix, const float* bias, const float* rows,
                     std::int64_t count, float* result) {
  ForCpu([&](auto lanes)
             DYNAMO_MOE_INLINED { MultiplyBy<lanes()>(matrix, bias, rows, count, result); });
}

}  // namespace dynamo_moe::onnxruntime
