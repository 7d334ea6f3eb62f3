#include "onnxruntime/packed_matrix.h"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <iterator>
#include <limits>
#include <vector>

#include "bundle/layer.h"
#include "onnxruntime/clones.h"
#include "onnxruntime/few_rows.h"

// Vectors are passed between functions that are all inlined.
#pragma GCC diagnostic ignored "-Wpsabi"

namespace dynamo_moe::onnxruntime {
namespace {

// The packed ones of format::kWeightFormats.
enum : std::uint32_t { kInt4 = 4, kMxfp4, kFp8, kNvfp4, kInt8, kFormats };
static_assert(std::size(format::kWeightFormats) == kFormats);

// Columns that are decoded together: those of a word of four-bit codes.
constexpr std::int64_t kPiece = 8;
using Floats [[gnu::vector_size(kPiece * sizeof(float))]] = float;
using Codes [[gnu::vector_size(kPiece * sizeof(std::int32_t))]] = std::int32_t;
constexpr float kInt4Zero = 8;

#define DYNAMO_MOE_INLINE [[gnu::always_inline]] inline
#define DYNAMO_MOE_INLINED __attribute__((always_inline))  // A lambda.

// The same bits as another type.
template <typename To, typename From>
DYNAMO_MOE_INLINE To BitsOf(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  std::memcpy(&to, &from, sizeof(to));
  return to;
}

DYNAMO_MOE_INLINE Floats Numbers(const Codes& codes) {
  return __builtin_convertvector(codes, Floats);
}

struct Uint4 {
  static constexpr std::int64_t kPerByte = 2;
  DYNAMO_MOE_INLINE static Floats Read(const Codes& codes) { return Numbers(codes); }
};

struct Int8 {
  static constexpr std::int64_t kPerByte = 1;
  DYNAMO_MOE_INLINE static Floats Read(const Codes& codes) { return Numbers((codes ^ 128) - 128); }
};

// Two bits of an exponent and one of a mantissa: eight numbers with a sign.
struct E2m1 {
  static constexpr std::int64_t kPerByte = 2;
  DYNAMO_MOE_INLINE static Floats Read(const Codes& codes) {
    constexpr Floats magnitudes = {0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
#ifdef __clang__
    Floats numbers = {};
    for (std::int64_t i = 0; i < kPiece; ++i) {
      numbers[i] = magnitudes[codes[i] & 7];
    }
#else
    const auto numbers = __builtin_shuffle(magnitudes, codes & 7);
#endif
    return BitsOf<Floats>(BitsOf<Codes>(numbers) | (codes & 8) << 28);
  }
};

// Four bits of an exponent and three of a mantissa; the last code is NaN.
struct E4m3 {
  static constexpr std::int64_t kPerByte = 1;
  DYNAMO_MOE_INLINE static Floats Read(const Codes& codes) {
    const Codes magnitudes = codes & 127;
    const Codes normal = (magnitudes << 20) + (120 << 23);
    const auto small = BitsOf<Codes>(0x1p-9F * Numbers(magnitudes));
    const Codes finite = magnitudes < 8 ? small : normal;
    const Codes quiet_nan = (magnitudes == 127) & 0x7FC00000;
    return BitsOf<Floats>(finite | quiet_nan | (codes & 128) << 24);
  }
};

// The numbers of a piece that begins with a byte.
template <typename Code>
DYNAMO_MOE_INLINE Floats ReadPiece(const std::uint8_t* bytes) {
  if constexpr (Code::kPerByte == 2) {
    std::int32_t word = 0;
    std::memcpy(&word, bytes, sizeof(word));
    constexpr Codes shifts = {0, 4, 8, 12, 16, 20, 24, 28};
    return Code::Read(((Codes{} + word) >> shifts) & 15);
  } else {
    std::int32_t codes[kPiece];
    for (std::int64_t i = 0; i < kPiece; ++i) {
      codes[i] = bytes[i];
    }
    return Code::Read(BitsOf<Codes>(codes));
  }
}

template <typename Code>
DYNAMO_MOE_INLINE float ReadOne(const std::uint8_t* row, std::int64_t column) {
  const std::int32_t byte = row[column / Code::kPerByte];
  return Code::Read(Codes{} + (Code::kPerByte == 1 ? byte : (byte >> (4 * (column % 2))) & 15))[0];
}

// Takes a row's numbers, a piece or one at a time. Scales and zero points are one for each block,
// of whose size the compiler makes use where it is fixed.
template <typename Code, bool Zeros, std::int64_t Fixed, typename Sink>
DYNAMO_MOE_INLINE void ReadBlocks(const std::uint8_t* row, std::int64_t columns, std::int64_t block,
                                  const float* scales, const float* zeros, Sink* sink) {
  const std::int64_t size = Fixed == 0 ? block : Fixed;
  for (std::int64_t from = 0, index = 0; from < columns; from += size, ++index) {
    const float scale = scales[index];
    const float zero = Zeros ? zeros[index] : 0;
    const auto piece = [&](std::int64_t column) DYNAMO_MOE_INLINED {
      const Floats numbers = ReadPiece<Code>(row + column / Code::kPerByte);
      return Floats((Zeros ? numbers - zero : numbers) * scale);
    };
    const std::int64_t to = Fixed == 0 ? std::min(from + size, columns) : from + Fixed;
    std::int64_t column = from;
    if (Fixed != 0 || from % Code::kPerByte == 0) {
      for (; column + 2 * kPiece <= to; column += 2 * kPiece) {
        sink->template Piece<0>(column, piece(column));
        sink->template Piece<1>(column + kPiece, piece(column + kPiece));
      }
    }
    for (; column < to; ++column) {
      const float number = ReadOne<Code>(row, column);
      sink->One(column, (Zeros ? number - zero : number) * scale);
    }
  }
}

template <typename Code, bool Zeros, typename Sink>
DYNAMO_MOE_INLINE void ReadRow(const std::uint8_t* row, std::int64_t columns, std::int64_t block,
                               const float* scales, const float* zeros, Sink* sink) {
  if constexpr (Code::kPerByte == 2) {
    constexpr std::int64_t of_nvfp4 = 16;
    constexpr std::int64_t common = 32;
    if (block == of_nvfp4 && columns % of_nvfp4 == 0) {
      return ReadBlocks<Code, Zeros, of_nvfp4>(row, columns, block, scales, zeros, sink);
    }
    if (block == common && columns % common == 0) {
      return ReadBlocks<Code, Zeros, common>(row, columns, block, scales, zeros, sink);
    }
  }
  ReadBlocks<Code, Zeros, 0>(row, columns, block, scales, zeros, sink);
}

// Writes a row.
struct Written {
  float* result;

  template <std::int64_t>
  DYNAMO_MOE_INLINE void Piece(std::int64_t column, const Floats& numbers) const {
    std::memcpy(result + column, &numbers, sizeof(numbers));
  }
  DYNAMO_MOE_INLINE void One(std::int64_t column, float number) const { result[column] = number; }
};

// Multiplies a row with each of some others. An addition waits for the one before it, so there are
// two sums of each.
template <std::int64_t Count>
struct Multiplied {
  const float* others;
  std::int64_t columns;
  Floats sums[Count][2];
  float rest[Count];

  template <std::int64_t Turn>
  DYNAMO_MOE_INLINE void Piece(std::int64_t column, const Floats& numbers) {
    for (std::int64_t r = 0; r < Count; ++r) {
      Floats other;
      std::memcpy(&other, others + r * columns + column, sizeof(other));
      sums[r][Turn] += numbers * other;
    }
  }
  DYNAMO_MOE_INLINE void One(std::int64_t column, float number) {
    for (std::int64_t r = 0; r < Count; ++r) {
      rest[r] += number * others[r * columns + column];
    }
  }
  DYNAMO_MOE_INLINE float Sum(std::int64_t r) const {
    float lanes[kPiece];
    const Floats both = sums[r][0] + sums[r][1];
    std::memcpy(lanes, &both, sizeof(lanes));
    for (std::int64_t half = kPiece / 2; half > 0; half /= 2) {
      for (std::int64_t lane = 0; lane < half; ++lane) {
        lanes[lane] += lanes[lane + half];
      }
    }
    return lanes[0] + rest[r];
  }
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

// A row's scales, from the first of them on.
DYNAMO_MOE_INLINE void ReadScales(const PackedMatrix& matrix, std::int64_t row, std::int64_t first,
                                  std::int64_t blocks, float* scales) {
  const void* const stored = matrix.scales;
  switch (matrix.scales_dtype) {
    case format::kFloat32:
      ReadNumbers<float>(stored, first, blocks, [](float scale) { return scale; }, scales);
      break;
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
        const Written written = {scales};
        ReadRow<E4m3, false>(codes, blocks, blocks, matrix.global_scales + row, nullptr, &written);
      }
      break;
  }
}

DYNAMO_MOE_INLINE void ReadZeros(const PackedMatrix& matrix, std::int64_t first,
                                 std::int64_t blocks, float* zeros) {
  if (matrix.zero_points == nullptr || matrix.one_zero_point) {
    const bool given = matrix.zero_points != nullptr;
    std::fill(zeros, zeros + blocks, given ? static_cast<float>(*matrix.zero_points) : kInt4Zero);
    return;
  }
  ReadNumbers<std::int8_t>(
      matrix.zero_points, first, blocks, [](std::int8_t zero) { return static_cast<float>(zero); },
      zeros);
}

// Takes the numbers of some rows; make(row) returns what takes a row's, and done(row, sink)
// follows.
template <typename Make, typename Done>
DYNAMO_MOE_INLINE void ReadRows(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows,
                                const Make& make, const Done& done) {
  const std::int64_t columns = matrix.columns;
  const std::int64_t block = matrix.block_columns;
  const std::int64_t blocks = (columns + block - 1) / block;
  const std::int64_t bytes = columns / format::kWeightFormats[matrix.weight_format].per_element;
  std::vector<float> numbers(2 * static_cast<std::size_t>(blocks));
  float* const scales = numbers.data();
  float* const zeros = scales + blocks;
  for (std::int64_t row = first; row < first + rows; ++row) {
    const std::uint8_t* const codes = matrix.values + row * bytes;
    const std::int64_t first_block = row / matrix.block_rows * blocks;
    ReadScales(matrix, row, first_block, blocks, scales);
    auto sink = make(row);
    switch (matrix.weight_format) {
      case kInt4:
        ReadZeros(matrix, first_block, blocks, zeros);
        ReadRow<Uint4, true>(codes, columns, block, scales, zeros, &sink);
        break;
      case kInt8:
        ReadRow<Int8, false>(codes, columns, block, scales, nullptr, &sink);
        break;
      case kFp8:
        ReadRow<E4m3, false>(codes, columns, block, scales, nullptr, &sink);
        break;
      default:
        ReadRow<E2m1, false>(codes, columns, block, scales, nullptr, &sink);
        break;
    }
    done(row, sink);
  }
}

template <std::int64_t Count>
DYNAMO_MOE_INLINE void Multiply(const PackedMatrix& matrix, const float* bias, const float* rows,
                                float* result) {
  const auto make = [&](std::int64_t) DYNAMO_MOE_INLINED {
    return Multiplied<Count>{rows, matrix.columns, {}, {}};
  };
  ReadRows(matrix, 0, matrix.rows, make, [&](std::int64_t o, const auto& sums) DYNAMO_MOE_INLINED {
    for (std::int64_t r = 0; r < Count; ++r) {
      result[r * matrix.rows + o] = sums.Sum(r) + (bias == nullptr ? 0 : bias[o]);
    }
  });
}

}  // namespace

DYNAMO_MOE_CLONES void Decode(const PackedMatrix& matrix, std::int64_t first, std::int64_t rows,
                              float* result) {
  const auto make = [&](std::int64_t row) DYNAMO_MOE_INLINED {
    return Written{result + (row - first) * matrix.columns};
  };
  ReadRows(matrix, first, rows, make, [](std::int64_t, const Written&) DYNAMO_MOE_INLINED {});
}

DYNAMO_MOE_CLONES void MultiplyFewRows(const PackedMatrix& matrix, const float* bias,
                                       const float* rows, std::int64_t count, float* result) {
  switch (count) {
    case 1:
      Multiply<1>(matrix, bias, rows, result);
      break;
    case 2:
      Multiply<2>(matrix, bias, rows, result);
      break;
    case 3:
      Multiply<3>(matrix, bias, rows, result);
      break;
    default:
      Multiply<kMostFewRows>(matrix, bias, rows, result);
      break;
  }
}

}  // namespace dynamo_moe::onnxruntime
