#include "onnxruntime/activation.h"

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "node/node.h"

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
  kActivations,
};
static_assert(std::size(format::kActivationNames) == kActivations);

constexpr float kQuickGeluSlope = 1.702F;
constexpr float kLeak = 0.01F;
constexpr float kSqrtHalf = 0.70710678F;
constexpr float kSqrtTwoOverPi = 0.79788456F;
constexpr float kBend = 0.044715F;
// From here on, mish(v) is v in float64 too.
constexpr float kMishBound = 20;
// The runtime's sigmoid is constant below this; the true one is at most 1.5e-8.
constexpr float kSigmoidBound = -18;

// Comparisons that a NaN fails keep it.
float Most(float value, float bound) { return value > bound ? bound : value; }
float Least(float value, float bound) { return value < bound ? bound : value; }

const char* FunctionOf(std::uint32_t activation) {
  switch (activation) {
    case kGelu:
      return "Erf";
    case kGeluTanh:
    case kTanh:
    case kElu:
      return "Tanh";
    case kMish:
      return "Exp";
    case kRelu:
    case kRelu2:
    case kHardswish:
    case kLeakyRelu:
    case kIdentity:
      return nullptr;
    default:
      return "Sigmoid";
  }
}

// v * sigmoid(slope * v)
float Swish(float value, float slope, float sigmoid) {
  return slope * value < kSigmoidBound ? 0 : value * sigmoid;
}

}  // namespace

// Where gates and ups lie: so many runs of so many numbers.
struct Activation::Layout {
  std::int64_t runs;
  std::int64_t length;
  std::int64_t stride;  // From one run to the next.
  std::int64_t step;    // From one number to the next.
  const float* gate;
  const float* up;  // Null without gating.
};

namespace {

template <typename Layout, typename Argument>
void Prepare(const Layout& layout, const Argument& argument, float* hidden) {
  for (std::int64_t run = 0; run < layout.runs; ++run) {
    const float* const gate = layout.gate + run * layout.stride;
    float* const result = hidden + run * layout.length;
    for (std::int64_t i = 0; i < layout.length; ++i) {
      result[i] = argument(gate[i * layout.step]);
    }
  }
}

// The hidden rows hold the function of the gates. The analyzer takes the ups' null for the gates'.
// NOLINTBEGIN(clang-analyzer-core.*)
template <typename Layout, typename Gate, typename Up>
void Finish(const Layout& layout, const Gate& gate_of, const Up& up_of, float* hidden) {
  for (std::int64_t run = 0; run < layout.runs; ++run) {
    const float* const gate = layout.gate + run * layout.stride;
    float* const result = hidden + run * layout.length;
    if (layout.up == nullptr) {
      for (std::int64_t i = 0; i < layout.length; ++i) {
        result[i] = gate_of(gate[i], result[i]);
      }
      continue;
    }
    const float* const up = layout.up + run * layout.stride;
    if (layout.step == 1) {
      for (std::int64_t i = 0; i < layout.length; ++i) {
        result[i] = gate_of(gate[i], result[i]) * up_of(up[i]);
      }
    } else {
      for (std::int64_t i = 0; i < layout.length; ++i) {
        result[i] = gate_of(gate[2 * i], result[i]) * up_of(up[2 * i]);
      }
    }
  }
}

// NOLINTEND(clang-analyzer-core.*)

// What the runtime's function is of, and the activation of the gate and that function.
template <typename Layout, typename Argument, typename Gate, typename Up>
Status Apply(const Call& call, const Op* function, const Layout& layout, float* hidden,
             const Argument& argument, const Gate& gate_of, const Up& up_of) {
  if (function != nullptr) {
    Prepare(layout, argument, hidden);
    const Matrix all = {hidden, layout.runs, layout.length};
    DYNAMO_MOE_RETURN_IF_ERROR((*function)(call, {all}, all));
  }
  Finish(layout, gate_of, up_of, hidden);
  return {};
}

}  // namespace

Status Activation::Create(const Api& api, const OrtKernelInfo* info,
                          const dynamo_moe_layer& layer) {
  layer_ = layer;
  const char* const name = FunctionOf(layer.activation);
  constexpr std::int32_t version = 13;
  return name == nullptr
             ? Status()
             : function_.Create(api, info, name, version, {{"T", kFloatElements}}, {}, 1);
}

Status Activation::OfRows(const Call& call, std::int64_t rows, const float* z,
                          float* hidden) const {
  const std::int64_t width = layer_.hidden;
  if (HasFlag(layer_, format::kInterleaved)) {
    return Run(call, {rows, width, 2 * width, 2, z, z + 1}, hidden);
  }
  return HasFlag(layer_, format::kGated)
             ? Run(call, {rows, width, 2 * width, 1, z, z + width}, hidden)
             : Run(call, {1, rows * width, 0, 1, z, nullptr}, hidden);
}

Status Activation::OfColumns(const Call& call, std::int64_t rows, const float* z,
                             float* hidden) const {
  const std::int64_t numbers = rows * layer_.hidden;
  if (HasFlag(layer_, format::kInterleaved)) {
    return Run(call, {layer_.hidden, rows, 2 * rows, 1, z, z + rows}, hidden);
  }
  const bool gated = HasFlag(layer_, format::kGated);
  return Run(call, {1, numbers, 0, 1, z, gated ? z + numbers : nullptr}, hidden);
}

Status Activation::Run(const Call& call, const Layout& layout, float* hidden) const {
  const Op* const function = FunctionOf(layer_.activation) == nullptr ? nullptr : &function_;
  const auto same = [](float value) { return value; };
  const auto run = [&](const auto& argument, const auto& gate_of) {
    return Apply(call, function, layout, hidden, argument, gate_of, same);
  };
  const float limit = layer_.limit;
  const float alpha = layer_.alpha;
  const auto clamped = [limit](float up) { return Least(Most(up, limit), -limit); };
  switch (layer_.activation) {
    case kGelu:
      return run([](float v) { return v * kSqrtHalf; },
                 [](float v, float erf) { return 0.5F * v * (1 + erf); });
    case kGeluTanh:
      return run([](float v) { return kSqrtTwoOverPi * (v + kBend * v * v * v); },
                 [](float v, float tanh) { return 0.5F * v * (1 + tanh); });
    case kSilu:
      return run(same, [](float v, float sigmoid) { return Swish(v, 1, sigmoid); });
    case kRelu:
      return run(same, [](float v, float) { return Least(v, 0); });
    case kRelu2:
      return run(same, [](float v, float) { return Least(v, 0) * Least(v, 0); });
    case kClampedSwiglu:
      return Apply(
          call, function, layout, hidden, [=](float v) { return alpha * Most(v, limit); },
          [=](float v, float sigmoid) { return Swish(Most(v, limit), alpha, sigmoid); },
          [=](float up) { return clamped(up) + 1; });
    case kClampedSilu:
      return Apply(
          call, function, layout, hidden, [=](float v) { return Most(v, limit); },
          [=](float v, float sigmoid) { return Swish(Most(v, limit), 1, sigmoid); }, clamped);
    case kQuickGelu:
      return run([](float v) { return kQuickGeluSlope * v; },
                 [](float v, float sigmoid) { return Swish(v, kQuickGeluSlope, sigmoid); });
    case kTanh:
      return run(same, [](float v, float tanh) { return std::isnan(v) ? v : tanh; });
    case kMish:
      return run([](float v) { return Most(v, kMishBound); },
                 [](float v, float power) {
                   const float n = power * (power + 2);
                   return v * (n / (n + 2));
                 });
    case kHardswish:
      return run(same, [](float v, float) { return v * Most(Least(v / 6 + 0.5F, 0), 1); });
    case kElu:
      // exp(v) - 1 as 2 tanh(v / 2) / (1 - tanh(v / 2)), which is accurate near zero.
      return run([](float v) { return Most(v, 0) / 2; },
                 [](float v, float tanh) { return v <= 0 ? 2 * tanh / (1 - tanh) : v; });
    case kLeakyRelu:
      return run(same, [](float v, float) { return v > 0 ? v : kLeak * v; });
    default:
      return run(same, [](float v, float) { return v; });
  }
}

}  // namespace dynamo_moe::onnxruntime
