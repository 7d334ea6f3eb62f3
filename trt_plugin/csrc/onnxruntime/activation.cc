#include "onnxruntime/activation.h"

#include <cstddef>
#include <cstring>
#include <iterator>

#include "node/node.h"
#include "onnxruntime/functions.h"

namespace dynamo_moe::onnxruntime {
namespace {

// The codes of format::kActivationNames.
enum : std::uint32_t {
  kGelu,
  kGeluTanh,
  kSilu,
  kRelu,
  kRelu2,
  kClampedSwiglu,
  kClampedSilu,
  kQuickGelu,
  kTanh,
  kMish,
  kHardswish,
  kElu,
  kLeakyRelu,
  kIdentity,
  kSoftcappedSilu,
  kActivations,
};
static_assert(std::size(format::kActivationNames) == kActivations);
static_assert(format::kSoftcappedSilu == kSoftcappedSilu);

constexpr float kQuickGeluSlope = 1.702F;
constexpr float kLeak = 0.01F;
constexpr float kSqrtHalf = 0.70710678F;
constexpr float kSqrtTwoOverPi = 0.79788456F;
constexpr float kBend = 0.044715F;
// From here on, mish(v) is v in float64 too.
constexpr float kMishBound = 20;

template <typename V>
DYNAMO_MOE_INLINE V Gelu(const V& v) {
  const V tail = 0.5F * Erfc(V(kSqrtHalf * Magnitudes(v)));
  return v * (v < 0 ? tail : 1 - tail);
}

template <typename V>
DYNAMO_MOE_INLINE V Mish(const V& v) {
  const V power = Exp(Most(v, kMishBound));
  const V n = power * (power + 2);
  return v * (n / (n + 2));
}

// exp(v) - 1 as 2 tanh(v / 2) / (1 - tanh(v / 2)), which is accurate near zero.
template <typename V>
DYNAMO_MOE_INLINE V Elu(const V& v) {
  const V tanh = Tanh(V(Most(v, 0) / 2));
  return v > 0 ? v : 2 * tanh / (1 - tanh);
}

template <typename V>
DYNAMO_MOE_INLINE V Softcap(const V& v, float cap) {
  return cap * Tanh(V(v / cap));
}

// How gates and ups lie in rows of z.
enum class Layout { kGatesAlone, kGatesThenUps, kInterleaved };

// Up to as many numbers as a vector has; the others are zeros.
template <std::int64_t Lanes>
DYNAMO_MOE_INLINE Floats<Lanes> ReadSome(const float* numbers, std::int64_t count) {
  if (count >= Lanes) {
    return Read<Lanes>(numbers);
  }
  float some[Lanes] = {};
  for (std::int64_t i = 0; i < count; ++i) {
    some[i] = numbers[i];
  }
  return Read<Lanes>(some);
}

template <std::int64_t Lanes>
DYNAMO_MOE_INLINE void WriteSome(const Floats<Lanes>& numbers, std::int64_t count, float* result) {
  if (count >= Lanes) {
    std::memcpy(result, &numbers, sizeof(numbers));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    result[i] = numbers[i];
  }
}

template <Layout Lies, std::int64_t Lanes, typename Gate, typename Up>
DYNAMO_MOE_INLINE void ActivateRow(const float* z, std::int64_t width, const Gate& gate_of,
                                   const Up& up_of, float* hidden) {
  for (std::int64_t i = 0; i < width; i += Lanes) {
    const std::int64_t count = width - i;
    if constexpr (Lies == Layout::kGatesAlone) {
      WriteSome<Lanes>(gate_of(ReadSome<Lanes>(z + i, count)), count, hidden + i);
    } else if constexpr (Lies == Layout::kGatesThenUps) {
      const auto gates = gate_of(ReadSome<Lanes>(z + i, count));
      const auto ups = up_of(ReadSome<Lanes>(z + width + i, count));
      WriteSome<Lanes>(gates * ups, count, hidden + i);
    } else {
      const auto first = ReadSome<Lanes>(z + 2 * i, 2 * count);
      const auto second =
          2 * count > Lanes ? ReadSome<Lanes>(z + 2 * i + Lanes, 2 * count - Lanes) : first;
      const Integers<Lanes> even = 2 * Places<Lanes>();
      const auto gates = gate_of(At<Lanes>(first, second, even));
      const auto ups = up_of(At<Lanes>(first, second, even + 1));
      WriteSome<Lanes>(gates * ups, count, hidden + i);
    }
  }
}

// How z lies in memory: a number of rows, each with gates of a width and, if gated, as many ups.
struct Rows {
  std::int64_t count;
  std::int64_t width;
  bool interleaved;
};

template <typename Gate, typename Up>
void ActivateRows(const dynamo_moe_layer& layer, const Rows& rows, const float* z,
                  const Gate& gate_of, const Up& up_of, float* hidden) {
  const std::int64_t width = rows.width;
  ForCpu([&](auto constant) DYNAMO_MOE_INLINED {
    constexpr std::int64_t lanes = constant();
    if (!HasFlag(layer, format::kGated)) {
      return ActivateRow<Layout::kGatesAlone, lanes>(z, rows.count * width, gate_of, up_of, hidden);
    }
    for (std::int64_t row = 0; row < rows.count; ++row) {
      const float* const from = z + row * 2 * width;
      float* const to = hidden + row * width;
      if (rows.interleaved) {
        ActivateRow<Layout::kInterleaved, lanes>(from, width, gate_of, up_of, to);
      } else {
        ActivateRow<Layout::kGatesThenUps, lanes>(from, width, gate_of, up_of, to);
      }
    }
  });
}

void ActivateAll(const dynamo_moe_layer& layer, const Rows& rows, const float* z, float* hidden) {
  const float limit = layer.limit;
  const float alpha = layer.alpha;
  const auto same = [](const auto& v) DYNAMO_MOE_INLINED { return v; };
  const auto clamped = [limit](const auto& v)
                           DYNAMO_MOE_INLINED { return Least(Most(v, limit), -limit); };
  const auto run = [&](const auto& gate_of) {
    ActivateRows(layer, rows, z, gate_of, same, hidden);
  };
  switch (layer.activation) {
    case kGelu:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Gelu(v); });
      break;
    case kGeluTanh:
      // (1 + tanh(u)) / 2 is the sigmoid of 2 u.
      run([](const auto& v) DYNAMO_MOE_INLINED {
        return v * Sigmoid(decltype(v + v)(2 * kSqrtTwoOverPi * (v + kBend * v * v * v)));
      });
      break;
    case kSilu:
      run([](const auto& v) DYNAMO_MOE_INLINED { return v * Sigmoid(v); });
      break;
    case kRelu:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Least(v, 0); });
      break;
    case kRelu2:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Least(v, 0) * Least(v, 0); });
      break;
    case kClampedSwiglu:
      ActivateRows(
          layer, rows, z,
          [=](const auto& v) DYNAMO_MOE_INLINED {
            const auto gates = Most(v, limit);
            return gates * Sigmoid(decltype(v + v)(alpha * gates));
          },
          [=](const auto& v) DYNAMO_MOE_INLINED { return clamped(v) + 1; }, hidden);
      break;
    case kClampedSilu:
      ActivateRows(
          layer, rows, z,
          [=](const auto& v) DYNAMO_MOE_INLINED {
            const auto gates = Most(v, limit);
            return gates * Sigmoid(gates);
          },
          clamped, hidden);
      break;
    case kSoftcappedSilu:
      ActivateRows(
          layer, rows, z,
          [=](const auto& v) DYNAMO_MOE_INLINED { return Softcap(v, alpha) * Sigmoid(v); },
          [=](const auto& v) DYNAMO_MOE_INLINED { return Softcap(v, limit); }, hidden);
      break;
    case kQuickGelu:
      run([](const auto& v)
              DYNAMO_MOE_INLINED { return v * Sigmoid(decltype(v + v)(kQuickGeluSlope * v)); });
      break;
    case kTanh:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Tanh(v); });
      break;
    case kMish:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Mish(v); });
      break;
    case kHardswish:
      run([](const auto& v)
              DYNAMO_MOE_INLINED { return v * Most(Least(decltype(v + v)(v + 3), 0), 6) / 6; });
      break;
    case kElu:
      run([](const auto& v) DYNAMO_MOE_INLINED { return Elu(v); });
      break;
    case kLeakyRelu:
      run([](const auto& v) DYNAMO_MOE_INLINED { return v > 0 ? v : kLeak * v; });
      break;
    default:
      run(same);
  }
}

}  // namespace

void Activate(const dynamo_moe_layer& layer, std::int64_t rows, const float* z, float* hidden) {
  ActivateAll(layer, {rows, layer.hidden, HasFlag(layer, format::kInterleaved)}, z, hidden);
}

void ActivateColumns(const dynamo_moe_layer& layer, std::int64_t columns, const float* z,
                     float* hidden) {
  const std::int64_t units = layer.hidden;
  // One after the other, the gates of all units and then their ups are as those of one long row.
  ActivateAll(layer,
              HasFlag(layer, format::kInterleaved) ? Rows{units, columns, false}
                                                   : Rows{1, units * columns, false},
              z, hidden);
}

}  // namespace dynamo_moe::onnxruntime
