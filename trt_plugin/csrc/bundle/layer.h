// The layer record: its codes, their names, and which values it may have.
#pragma once

#include <cstdint>

#include "dynamo_moe.h"
#include "status.h"

namespace dynamo_moe::format {

enum Operator : std::uint32_t { kDropless, kExpertsOnly, kOperators };

enum DataType : std::uint32_t { kNone, kFloat32, kFloat16, kBfloat16, kI32, kI64, kUint8 };
inline constexpr const char* kDataTypeNames[] = {"none",  "float32", "float16", "bfloat16",
                                                 "int32", "int64",   "uint8"};

enum LayerFlag : std::uint32_t {
  kHasB1 = 1,
  kHasB2 = 2,
  kGated = 4,
  kInterleaved = 8,
  kWeightOnInput = 16,
  kRenormalize = 32,
  kTf32 = 64,
  kRmsNorm = 128,
  kResidual = 256,
  kLayerFlags = 511,
};

enum Activation : std::uint32_t {
  kGelu,
  kGeluTanh,
  kSilu,
  kRelu,
  kRelu2,
  kClampedSwiglu,
  kClampedSilu,
  kActivations,
};
inline constexpr const char* kActivationNames[kActivations] = {
    "gelu", "gelu_tanh", "silu", "relu", "relu2", "clamped_swiglu", "clamped_silu"};
constexpr bool IsClamped(std::uint32_t activation) {
  return activation == kClampedSwiglu || activation == kClampedSilu;
}

enum Scoring : std::uint32_t { kSoftmax, kTopkSoftmax, kSigmoid, kScorings };
inline constexpr const char* kScoringNames[kScorings] = {"softmax", "topk_softmax", "sigmoid"};

inline constexpr std::uint32_t kMaxExperts = 1024;
inline constexpr std::uint32_t kMaxTopK = 32;
// Rows of 16-bit elements then begin at multiples of 16 bytes.
inline constexpr std::uint32_t kSizeMultiple = 8;

}  // namespace dynamo_moe::format

namespace dynamo_moe {

// Checks that kernels exist for such a layer, and that fields which do not apply to it are 0:
// records are compared as bytes.
Status CheckLayer(const dynamo_moe_layer& layer);

}  // namespace dynamo_moe
