// The operators of MoE layers on the CPU, with ONNX Runtime's own products.
//
// How an expert's product is computed depends on its tokens. Of a few the loops are our own, and
// read weights where they lie. Of more it is the runtime's, with the weights on the left: what is
// on the right it copies into the order that its loops read, and some tokens at a time are less to
// copy than a matrix. So tokens are columns there. Packed weights, and those in half precision,
// become float32 for the product, in parts that stay in the cache, and packed ones in registers for
// very few.
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
#include "onnxruntime/layer_node.h"
#include "onnxruntime/runtime.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

class Kernel {
 public:
  // Checks a node's attributes and dtypes.
  static Status Create(const Api& api, const Node& node, const OrtKernelInfo* info,
                       std::unique_ptr<Kernel>* kernel);

  // Checks the inputs' shapes and computes y. Any number of threads may do so.
  Status Compute(OrtKernelContext* context) const;

  const Api& api() const { return api_; }

 private:
  struct Inputs;
  struct Routing;
  struct Slots;
  struct Block;
  class Weight;

  explicit Kernel(const Api& api) : api_(api) {}

  Status CreateOps(const OrtKernelInfo* info);

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
  // One expert's two products with the activation between.
  Status RunBlock(const Call& call, const Inputs& inputs, const Routing& routing,
                  const Slots& slots, const Block& block, float* results) const;
  // The same of many rows x [R, D], with weights that lie as (out, in).
  Status RunColumns(const Call& call, const Inputs& inputs, const Block& block, const float* x,
                    float* results) const;
  Status GatherRows(const Call& call, const Inputs& inputs, const Routing& routing,
                    const Slots& slots, const Block& block, float* rows) const;
  // The product of R rows [R, in] and an expert's matrix, (out, in) or transposed.
  // Where it is split, threads take parts of it.
  static Status Multiply(const Call& call, const Op& product, bool transposed, bool split,
                         Weight* weight, const float* bias, const Matrix& rows,
                         const Matrix& result);
  std::int64_t UpRows() const {
    return (HasFlag(node_.layer, format::kGated) ? 2 : 1) * std::int64_t{node_.layer.hidden};
  }
  void Combine(const Inputs& inputs, const Routing& routing, const Slots& slots,
               const float* results, std::int64_t token, float* y) const;

  std::int64_t BlockRows() const;

  Api api_;
  LayerNode node_;
  Owned<OrtMemoryInfo> memory_{nullptr, {nullptr}};
  Op router_;
  Op score_;
  // Whether products of many rows have these as columns, with the weights on the left.
  bool in_columns_ = false;
  // Up to as many rows are multiplied by our own loops.
  std::int64_t few_rows_ = 0;
  Op up_;
  Op down_;
  // By the code of the dtype in half precision.
  std::array<Op, format::kBfloat16 + 1> widen_;
  std::array<Op, format::kBfloat16 + 1> narrow_;
};

}  // namespace dynamo_moe::onnxruntime
