// DroplessMoE and DroplessMoEExperts on the CPU, with ONNX Runtime's own products.
//
// Each expert's product is that of its weight and its tokens, in this order: the runtime reads the
// left matrix as it lies and copies the right one, and the tokens are much less. So hidden rows are
// columns.
//
// Legend: T tokens, D model width, H hidden width, F = H, or 2H when gated, E experts, K experts
// per token, R rows of one expert.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "bundle/format.h"
#include "node/node.h"
#include "onnxruntime/activation.h"
#include "onnxruntime/runtime.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

class Kernel {
 public:
  // Checks a node's attributes and dtypes.
  static Status Create(const Api& api, format::Operator op, const OrtKernelInfo* info,
                       std::unique_ptr<Kernel>* kernel);

  // Checks the inputs' shapes and computes y. Any number of threads may do so.
  Status Compute(OrtKernelContext* context) const;

  const Api& api() const { return api_; }

 private:
  struct Inputs;
  struct Routing;
  struct Slots;
  struct Block;

  Kernel(const Api& api, format::Operator op) : api_(api), node_{op, false} {}

  Status ReadAttributes(const OrtKernelInfo* info);
  Status ReadOption(const OrtKernelInfo* info, const format::Option& option);
  Status ReadDtypes(const OrtKernelInfo* info);
  Status CreateOps(const OrtKernelInfo* info);

  bool Has(format::Tensor tensor) const { return dtypes_[tensor] != format::kNone; }
  Status ReadInputs(const Call& call, Inputs* inputs) const;
  Status CheckShape(format::Tensor tensor, const std::vector<std::int64_t>& sizes,
                    const std::vector<std::int64_t>& x) const;

  // Numbers of an input in float32: the input itself, or a copy.
  Status Widen(const Call& call, const Inputs& inputs, format::Tensor tensor, std::int64_t count,
               Buffer<float>* copy, const float** numbers) const;
  // Rounds numbers to the experts' dtype.
  Status RoundToExperts(const Call& call, std::int64_t count, float* numbers) const;
  Status Round(const Call& call, std::uint32_t dtype, std::int64_t count, float* numbers) const;

  Status Route(const Call& call, const Inputs& inputs, const float* x, Routing* routing) const;
  Status Score(const Call& call, const Inputs& inputs, const float* x, Buffer<float>* logits,
               Buffer<float>* scores) const;
  Status ReadRouting(const Call& call, const Inputs& inputs, Routing* routing) const;

  Status RunExperts(const Call& call, const Inputs& inputs, const Routing& routing,
                    std::int64_t first, std::int64_t tokens, float* y) const;
  Status RunBlock(const Call& call, const Inputs& inputs, const Routing& routing,
                  const Slots& slots, const Block& block, float* results) const;
  Status GatherRows(const Call& call, const Inputs& inputs, const Routing& routing,
                    const Slots& slots, const Block& block, float* rows) const;
  // One expert's product, for R columns; the bias may be null.
  Status Multiply(const Call& call, const Op& product, format::Tensor weight, const void* weights,
                  std::int64_t expert, const float* bias, const Matrix& right,
                  const Matrix& result) const;
  void Combine(const Inputs& inputs, const Routing& routing, const Slots& slots,
               const float* results, std::int64_t token, float* y) const;

  std::int64_t BlockRows() const;

  Api api_;
  Node node_;
  dynamo_moe_layer layer_ = {};
  std::array<std::uint32_t, format::kTensors> dtypes_ = {};
  Owned<OrtMemoryInfo> memory_{nullptr, {nullptr}};
  Op router_;
  Op score_;
  Op up_;
  Op down_;
  Activation activation_;
  // By the code of the dtype in half precision.
  std::array<Op, format::kBfloat16 + 1> widen_;
  std::array<Op, format::kBfloat16 + 1> narrow_;
};

}  // namespace dynamo_moe::onnxruntime
