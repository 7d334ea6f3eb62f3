// DroplessMoE and DroplessMoEExperts on the CPU, with ONNX Runtime's own products.
//
// How an expert's product is computed depends on its tokens. A few are rows, and the loops are our
// own: such a product takes as long as the weights take to be read. Of some more, hidden rows are
// columns, the product that of the weight and the tokens, in this order: the runtime reads the left
// matrix as it lies and copies the right one, and the tokens are less. Many are rows again.
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
  // Rounds numbers to a dtype.
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
  // One expert's two products with the activation between; x is [R, D].
  Status RunColumns(const Call& call, const Inputs& inputs, const Block& block, const float* x,
                    float* buffer, float* results) const;
  Status RunRows(const Call& call, const Inputs& inputs, const Block& block, const float* x,
                 float* buffer, float* results) const;
  // An expert's matrix in float32: the input itself, or a copy.
  Status ReadExpert(const Call& call, const Inputs& inputs, format::Tensor weight,
                    std::int64_t expert, Buffer<float>* copy, Matrix* matrix) const;
  // The product of an expert's matrix and R columns, in parts of the result that stay in the cache.
  static Status MultiplyColumns(const Call& call, const Op& product, const Matrix& matrix,
                                const float* bias, const Matrix& columns, const Matrix& result);
  // The product of R rows [R, in] and an expert's matrix.
  Status MultiplyRows(const Call& call, format::Tensor weight, const Matrix& matrix,
                      const float* bias, const Matrix& rows, const Matrix& result) const;
  std::int64_t UpRows() const {
    return (HasFlag(layer_, format::kGated) ? 2 : 1) * std::int64_t{layer_.hidden};
  }
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
  Op up_columns_;
  Op down_columns_;
  Op up_rows_;
  Op down_rows_;
  Activation activation_;
  // By the code of the dtype in half precision.
  std::array<Op, format::kBfloat16 + 1> widen_;
  std::array<Op, format::kBfloat16 + 1> narrow_;
};

}  // namespace dynamo_moe::onnxruntime
