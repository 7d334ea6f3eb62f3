// A layer's attributes, whatever runtime reads them from a node.
#pragma once

#include <cstdint>
#include <limits>
#include <string>

#include "bundle/layer.h"
#include "node/node.h"
#include "status.h"

namespace dynamo_moe {

// Where a runtime keeps a node's attributes. Each function returns whether there is such an
// attribute, and leaves the value where there is none.
class NodeAttributes {
 public:
  virtual ~NodeAttributes() = default;
  virtual bool Integer(const char* name, std::int64_t* value) const = 0;
  virtual bool Number(const char* name, float* value) const = 0;
  virtual bool Text(const char* name, std::string* value) const = 0;
};

// The most experts, choices, and features of a layer, and what its features must be multiples of.
struct SizeLimits {
  std::int64_t experts;
  std::int64_t top_k;
  std::int64_t features;
  std::uint32_t multiple;
};
// Those of the kernels.
inline constexpr SizeLimits kKernelLimits = {format::kMaxExperts, format::kMaxTopK,
                                             std::numeric_limits<std::int32_t>::max(),
                                             format::kSizeMultiple};

// The attribute that names a bundle of kernels.
inline constexpr const char* kKernels = "kernels";
// The attributes that only offloaded layers have.
inline constexpr const char* kResidentExperts = "resident_experts";
inline constexpr const char* kW1Source = "w1_source";
inline constexpr const char* kW2Source = "w2_source";
inline constexpr const char* kExpertCache = "expert_cache";

// Where an offloaded layer's experts lie in files, and whose its cache of them is.
struct Offload {
  std::string w1_source;
  std::string w2_source;
  // The contexts of an engine, or the streams of a session, have one cache, not each its own.
  bool shared = false;
};

// Checks the attributes. Fields of the layer that do not apply are 0, as in a bundle. So is what
// follows from the inputs and the bundle: dtypes, biases, zero points, tf32, and a format of
// weights that are not packed.
Status ReadAttributes(const NodeAttributes& attributes, const Node& node, const SizeLimits& limits,
                      dynamo_moe_layer* layer);
// Completes the attributes of a layer whose experts lie in host memory.
Status ReadOffload(const NodeAttributes& attributes, dynamo_moe_layer* layer, Offload* offload);

// A layer's attributes in words, for messages, the engine inspector and the timing cache.
std::string Describe(const dynamo_moe_layer& layer);

}  // namespace dynamo_moe
