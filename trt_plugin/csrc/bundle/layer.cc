#include "bundle/layer.h"

#include <algorithm>
#include <cmath>

namespace dynamo_moe {
namespace {

template <typename... Parts>
Status Wrong(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_BUNDLE, Text("the layer's ", parts...)};
}

bool IsFloat(std::uint32_t type) {
  return type == format::kFloat32 || type == format::kFloat16 || type == format::kBfloat16;
}

bool Has(const dynamo_moe_layer& layer, std::uint32_t flag) { return (layer.flags & flag) != 0; }

Status CheckDtypes(const dynamo_moe_layer& layer, bool router) {
  const bool ints = layer.routing_dtype == format::kI32 || layer.routing_dtype == format::kI64;
  const bool no_bias = router && layer.weights_dtype == format::kNone;
  if (!IsFloat(layer.tokens_dtype) || !IsFloat(layer.experts_dtype)) {
    return Wrong("tokens and experts must be float32 (1), float16 (2) or bfloat16 (3), got ",
                 layer.tokens_dtype, " and ", layer.experts_dtype);
  }
  if (!(router ? IsFloat(layer.routing_dtype) : ints)) {
    return Wrong("routing dtype must be ",
                 router ? "float32 (1), float16 (2) or bfloat16 (3)" : "int32 (4) or int64 (5)",
                 ", got ", layer.routing_dtype);
  }
  if (!no_bias && !IsFloat(layer.weights_dtype)) {
    return Wrong(router ? "router bias" : "expert weights",
                 " must be float32 (1), float16 (2) or bfloat16 (3)",
                 router ? " or absent (0)" : "", ", got ", layer.weights_dtype);
  }
  return {};
}

Status CheckSizes(const dynamo_moe_layer& layer, bool router) {
  const std::uint32_t most = router ? std::min(format::kMaxTopK, layer.experts) : format::kMaxTopK;
  if (layer.experts < 1 || layer.experts > format::kMaxExperts) {
    return Wrong("experts must be in 1..", format::kMaxExperts, ", got ", layer.experts);
  }
  if (layer.top_k < 1 || layer.top_k > most) {
    return Wrong("top_k must be in 1..", most, ", got ", layer.top_k);
  }
  for (const std::uint32_t size : {layer.width, layer.hidden}) {
    if (size < format::kSizeMultiple || size % format::kSizeMultiple != 0) {
      return Wrong("width and hidden must be multiples of ", format::kSizeMultiple, ", got ",
                   layer.width, " and ", layer.hidden);
    }
  }
  return {};
}

Status CheckOptions(const dynamo_moe_layer& layer, bool router) {
  const bool clamped = format::IsClamped(layer.activation);
  if ((clamped || Has(layer, format::kInterleaved)) && !Has(layer, format::kGated)) {
    return Wrong(clamped ? "clamped activation" : "flag interleaved", " needs flag gated");
  }
  const bool renormalizes = router && layer.scoring != format::kTopkSoftmax;
  const bool float32 = layer.experts_dtype == format::kFloat32;
  const struct {
    const char* name;
    bool applies;
    double value;
  } options[] = {
      {"scoring", router, static_cast<double>(layer.scoring)},
      {"routed_scaling", router, layer.routed_scaling},
      {"flag renormalize", renormalizes, static_cast<double>(layer.flags & format::kRenormalize)},
      {"flag tf32", float32, static_cast<double>(layer.flags & format::kTf32)},
      {"alpha", layer.activation == format::kClampedSwiglu, layer.alpha},
      {"limit", clamped, layer.limit},
      {"norm_eps", Has(layer, format::kRmsNorm), layer.norm_eps},
  };
  for (const auto& option : options) {
    if (!std::isfinite(option.value)) {
      return Wrong(option.name, " must be finite, got ", option.value);
    }
    if (!option.applies && option.value != 0) {
      return Wrong(option.name, " does not apply and must be 0, got ", option.value);
    }
  }
  return {};
}

}  // namespace

Status CheckLayer(const dynamo_moe_layer& layer) {
  const struct {
    const char* name;
    std::uint32_t value;
    std::uint32_t limit;
  } codes[] = {
      {"operator", layer.op, format::kOperators},
      {"flags", layer.flags, format::kLayerFlags + 1},
      {"activation", layer.activation, format::kActivations},
      {"scoring", layer.scoring, format::kScorings},
  };
  for (const auto& code : codes) {
    if (code.value >= code.limit) {
      return Wrong(code.name, " must be below ", code.limit, ", got ", code.value);
    }
  }
  const bool router = layer.op == format::kDropless;
  DYNAMO_MOE_RETURN_IF_ERROR(CheckDtypes(layer, router));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckSizes(layer, router));
  return CheckOptions(layer, router);
}

}  // namespace dynamo_moe
