#include "onnxruntime/few_rows.h"

#include "onnxruntime/vectors.h"

namespace dynamo_moe::onnxruntime {
namespace {

// A tile of the result: so many columns and, at most, rows, whose sums stay in registers.
constexpr std::int64_t kOuts = 4;
template <std::int64_t Lanes>
constexpr std::int64_t kRows = Lanes == kWideLanes ? 4 : 3;

struct Product {
  const float* weight;
  std::int64_t out;
  std::int64_t in;
  const float* bias;
  const float* rows;
  float* result;
  std::int64_t width;
};

// Computes a tile's columns, `apart` from each other, or one column, of some rows.
template <std::int64_t Outs, std::int64_t Count, std::int64_t Lanes>
DYNAMO_MOE_INLINE void MultiplyTile(const Product& product, std::int64_t row, std::int64_t column,
                                    std::int64_t apart) {
  const std::int64_t in = product.in;
  const float* const weight = product.weight + column * in;
  const float* const rows = product.rows + row * in;
  Floats<Lanes> sums[Count][Outs] = {};
  std::int64_t i = 0;
  for (; i + Lanes <= in; i += Lanes) {
    Floats<Lanes> weights[Outs];
    for (std::int64_t o = 0; o < Outs; ++o) {
      weights[o] = Read<Lanes>(weight + o * apart * in + i);
    }
    for (std::int64_t r = 0; r < Count; ++r) {
      const auto numbers = Read<Lanes>(rows + r * in + i);
      for (std::int64_t o = 0; o < Outs; ++o) {
        sums[r][o] += weights[o] * numbers;
      }
    }
  }
  float totals[Count][Outs];
#pragma GCC unroll 4
  for (std::int64_t r = 0; r < Count; ++r) {
    SumEach<Lanes>(sums[r], totals[r]);
  }
  for (; i < in; ++i) {
    for (std::int64_t r = 0; r < Count; ++r) {
      for (std::int64_t o = 0; o < Outs; ++o) {
        totals[r][o] += weight[o * apart * in + i] * rows[r * in + i];
      }
    }
  }
  for (std::int64_t o = 0; o < Outs; ++o) {
    const std::int64_t out = column + o * apart;
    const float bias = product.bias == nullptr ? 0 : product.bias[out];
    for (std::int64_t r = 0; r < Count; ++r) {
      product.result[(row + r) * product.width + out] = totals[r][o] + bias;
    }
  }
}

// A column of tiles, whose weights are read from memory once and then lie in the cache.
template <std::int64_t Outs, std::int64_t Last, std::int64_t Lanes>
DYNAMO_MOE_INLINE void MultiplyTiles(const Product& product, std::int64_t full, std::int64_t column,
                                     std::int64_t apart) {
  for (std::int64_t row = 0; row < full; row += kRows<Lanes>) {
    MultiplyTile<Outs, kRows<Lanes>, Lanes>(product, row, column, apart);
  }
  MultiplyTile<Outs, Last, Lanes>(product, full, column, apart);
}

// A tile's columns are as far apart as can be: two of the matrix's rows in one page took twice as
// long to arrive from memory as one after the other (AMD EPYC 9004).
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void MultiplyBy(const Product& product, std::int64_t count) {
  const std::int64_t apart = product.out / kOuts;
  const std::int64_t full = (count - 1) / kRows<Lanes> * kRows<Lanes>;
  WithCount<kRows<Lanes>>(count - full, [&](auto last) DYNAMO_MOE_INLINED {
    for (std::int64_t column = 0; column < apart; ++column) {
      MultiplyTiles<kOuts, last(), Lanes>(product, full, column, apart);
    }
    for (std::int64_t column = apart * kOuts; column < product.out; ++column) {
      MultiplyTiles<1, last(), Lanes>(product, full, column, 0);
    }
  });
}

}  // namespace

void MultiplyFewRows(const float* weight, std::int64_t out, std::int64_t in, const float* bias,
                     const float* rows, std::int64_t count, float* result, std::int64_t width) {
  const Product product = {weight, out, in, bias, rows, result, width};
  ForCpu([&](auto lanes) DYNAMO_MOE_INLINED { MultiplyBy<lanes()>(product, count); });
}

}  // namespace dynamo_moe::onnxruntime
