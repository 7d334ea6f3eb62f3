// Compares the activations of all float32 numbers of some exponents, and of what is no number, with
// those in float64, in rows of many widths whose memory ends where they end. Sanitizers see what is
// read.
#include "onnxruntime/activation.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <limits>
#include <memory>
#include <vector>

#include "bundle/layer.h"

namespace {

namespace format = dynamo_moe::format;

constexpr float kLimit = 7;
constexpr float kAlpha = 1.702F;

double Sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double GeluTanh(double v) {
  // (1 + tanh(u)) / 2 loses what is left of it far below zero.
  return v * Sigmoid(2 * std::sqrt(2 / std::acos(-1.0)) * (v + 0.044715 * v * v * v));
}

double Mish(double v) { return v * std::tanh(std::log1p(std::exp(v))); }

double ClampedSwiglu(double v) {
  const double gate = std::min<double>(v, kLimit);
  return gate * Sigmoid(double{kAlpha} * gate);
}

double ClampedSilu(double v) {
  const double gate = std::min<double>(v, kLimit);
  return gate * Sigmoid(gate);
}

double SoftcappedSilu(double v) {
  return double{kAlpha} * std::tanh(v / double{kAlpha}) * Sigmoid(v);
}

// In the order of format::kActivationNames; errors in units of the last place of the true value, or
// of 1e-30 where that is less.
struct Activation {
  double (*of)(double);
  double most;
};
// The error of an exponent's rounding grows with the exponent.
const Activation kActivations[] = {
    {[](double v) { return 0.5 * v * std::erfc(-v / std::sqrt(2.0)); }, 250},
    {GeluTanh, 200},
    {[](double v) { return v * Sigmoid(v); }, 6},
    {[](double v) { return (v < 0 ? 0 : v); }, 0},
    {[](double v) { return v < 0 ? 0 : v * v; }, 0.5},
    {ClampedSwiglu, 100},
    {ClampedSilu, 6},
    {[](double v) { return v * Sigmoid(1.702 * v); }, 120},
    {[](double v) { return std::tanh(v); }, 2},
    {Mish, 4},
    {[](double v) { return v * std::clamp(v / 6 + 0.5, 0.0, 1.0); }, 3},
    {[](double v) { return v > 0 ? v : std::expm1(v); }, 3},
    {[](double v) { return v > 0 ? v : 0.01 * v; }, 1},
    {[](double v) { return v; }, 0},
    {SoftcappedSilu, 5},
};
static_assert(std::size(kActivations) == std::size(format::kActivationNames));

double ErrorOf(double wanted, float found) {
  const double magnitude = std::max(std::abs(wanted), 1e-30);
  const double place = std::ldexp(1.0, std::ilogb(magnitude) - 23);
  return std::abs(wanted - static_cast<double>(found)) / place;
}

// What the gate's value is multiplied by, where up is 2.
double UpOf(std::uint32_t code) {
  if (code == format::kSoftcappedSilu) {
    return double{kLimit} * std::tanh(2 / double{kLimit});
  }
  return std::strcmp(format::kActivationNames[code], "clamped_swiglu") == 0 ? 3 : 2;
}

enum class Form { kPlain, kGated, kInterleaved };

// Gates, and ups of two, as an expert's first product is laid out.
bool Agrees(std::uint32_t code, Form form, const std::vector<float>& numbers, std::int64_t width) {
  dynamo_moe_layer layer = {};
  layer.activation = code;
  layer.hidden = static_cast<std::uint32_t>(width);
  layer.limit = kLimit;
  layer.alpha = kAlpha;
  layer.flags = form == Form::kPlain   ? 0
                : form == Form::kGated ? format::kGated
                                       : format::kGated | format::kInterleaved;
  const std::int64_t rows = static_cast<std::int64_t>(numbers.size()) / width;
  const auto count = static_cast<std::size_t>(rows * width);
  const std::size_t given = form == Form::kPlain ? count : 2 * count;
  const std::unique_ptr<float[]> z(new float[given]);
  const std::unique_ptr<float[]> columns(new float[given]);
  const std::unique_ptr<float[]> hidden(new float[count]);
  const std::unique_ptr<float[]> hidden_columns(new float[count]);
  const auto per_row = static_cast<std::size_t>(width);
  for (std::size_t i = 0; i < count; ++i) {
    const std::size_t row = i / per_row;
    const std::size_t column = i % per_row;
    if (form == Form::kPlain) {
      z[i] = numbers[i];
    } else if (form == Form::kGated) {
      z[row * 2 * per_row + column] = numbers[i];
      z[row * 2 * per_row + per_row + column] = 2;
    } else {
      z[2 * i] = numbers[i];
      z[2 * i + 1] = 2;
    }
  }
  dynamo_moe::onnxruntime::Activate(layer, rows, z.get(), hidden.get());
  // The same numbers as columns.
  const auto tokens = static_cast<std::size_t>(rows);
  const std::size_t of_token = given / tokens;
  for (std::size_t i = 0; i < given; ++i) {
    columns[i % of_token * tokens + i / of_token] = z[i];
  }
  dynamo_moe::onnxruntime::ActivateColumns(layer, rows, columns.get(), hidden_columns.get());
  for (std::size_t i = 0; i < count; ++i) {
    const float found = hidden_columns[i % per_row * tokens + i / per_row];
    if (std::memcmp(&found, &hidden[i], sizeof(found)) != 0 &&
        !(std::isnan(found) && std::isnan(hidden[i]))) {
      std::printf("%s, %lld columns: %g as columns, %g as rows\n", format::kActivationNames[code],
                  static_cast<long long>(width), static_cast<double>(found),
                  static_cast<double>(hidden[i]));
      return false;
    }
  }
  const char* const name = format::kActivationNames[code];
  const double up = form == Form::kPlain ? 1 : UpOf(code);
  for (std::size_t i = 0; i < count; ++i) {
    const double wanted = kActivations[code].of(double{numbers[i]}) * up;
    const double error =
        std::isnan(wanted) && std::isnan(hidden[i]) ? 0 : ErrorOf(wanted, hidden[i]);
    const bool infinite = std::abs(wanted) > double{std::numeric_limits<float>::max()};
    if (infinite ? static_cast<double>(hidden[i]) == wanted || std::isinf(hidden[i])
                 : error <= kActivations[code].most) {
      continue;
    }
    std::printf("%s(%g), %lld columns: %g, not %g: %g units\n", name,
                static_cast<double>(numbers[i]), static_cast<long long>(width),
                static_cast<double>(hidden[i]), wanted, error);
    return false;
  }
  return true;
}

}  // namespace

int main() {
  std::vector<float> numbers = {0, -0.0F, std::nanf(""), 1e30F, -1e3F};
  // Every so many numbers from 1e-6 to 100, of both signs.
  constexpr std::uint32_t first = 0x358637BD;
  constexpr std::uint32_t last = 0x42C80000;
  for (std::uint32_t bits = first; bits < last; bits += 4999) {
    float number = 0;
    std::memcpy(&number, &bits, sizeof(number));
    numbers.push_back(number);
    numbers.push_back(-number);
  }
  for (std::uint32_t code = 0; code < std::size(kActivations); ++code) {
    const bool plain = !format::IsGating(code);
    for (const std::int64_t width : {1, 7, 8, 19, 33, 4096}) {
      for (const Form form : {Form::kPlain, Form::kGated, Form::kInterleaved}) {
        if ((form != Form::kPlain || plain) && !Agrees(code, form, numbers, width)) {
          return 1;
        }
      }
    }
  }
  std::printf("%zu activations\n", std::size(kActivations));
  return 0;
}
