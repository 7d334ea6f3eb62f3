#include "onnxruntime/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <numeric>

#include "onnxruntime/activation.h"
#include "onnxruntime/few_rows.h"
#include "onnxruntime/packed_matrix.h"
#include "onnxruntime/router.h"

namespace dynamo_moe::onnxruntime {
namespace {

// A block of rows has at most as many numbers in its buffers, and a call's results as many in all.
constexpr std::int64_t kBlockNumbers = std::int64_t{1} << 22;
constexpr std::int64_t kResultNumbers = std::int64_t{1} << 25;
constexpr std::int64_t kLeastBlockRows = 32;
constexpr std::int64_t kMostBlockRows = 512;
constexpr std::int64_t kLeastTokens = 1024;
// Many rows are multiplied as so many columns at a time: their copy stays in the cache, and the
// loops of ONNX Runtime take 32 at once.
constexpr std::int64_t kColumnsAtOnce = 64;
// More columns than that are multiplied by so many numbers of a matrix at a time, which stay in the
// cache until all columns had them.
constexpr std::int64_t kReusedNumbers = std::int64_t{1} << 20;
// Rows for our own loops stay in the cache's first level; from eight on, columns take no longer.
constexpr std::int64_t kFewNumbers = std::int64_t{3} << 12;
constexpr std::int64_t kLeastFewRows = 8;
// A copy of some rows of a matrix stays in the cache until it has been multiplied.
constexpr std::int64_t kCopyNumbers = std::int64_t{1} << 18;
// With fewer blocks than threads may be, the weights of one are read by several, as many at a time
// as take some ten microseconds.
constexpr std::size_t kFewBlocks = 16;
constexpr std::int64_t kPieceNumbers = std::int64_t{1} << 16;
// Tokens of a piece of work that is little for each.
constexpr std::int64_t kTokensAtOnce = 8;

ElementType TypeOf(std::uint32_t dtype) {
  return dtype == format::kFloat16 ? kFloat16Elements : kBfloat16Elements;
}

const float* BiasOf(const float* all, std::int64_t expert, std::int64_t count) {
  return all == nullptr ? nullptr : all + expert * count;
}

// Writes [columns, rows] of a matrix [rows, columns].
void Transpose(const float* matrix, std::int64_t rows, std::int64_t columns, float* result) {
  constexpr std::int64_t lines = 16;  // What is written at a time is a line of the cache.
  for (std::int64_t first = 0; first < rows; first += lines) {
    const std::int64_t end = std::min(first + lines, rows);
    for (std::int64_t column = 0; column < columns; ++column) {
      for (std::int64_t row = first; row < end; ++row) {
        result[column * rows + row] = matrix[row * columns + column];
      }
    }
  }
}

}  // namespace

// A call's inputs, those of them in float32 that every token needs.
struct Kernel::Inputs : Tensors {
  const float* x = nullptr;
  const float* b1 = nullptr;
  const float* b2 = nullptr;
};

// [T, K]
struct Kernel::Routing {
  Buffer<std::int32_t> ids;
  Buffer<float> copied_weights;
  const float* weights = nullptr;
};

// The slots of some tokens in the order of their experts.
struct Kernel::Slots {
  std::int64_t first = 0;              // Token.
  std::vector<std::int64_t> starts;    // [E + 1]: each expert's first place.
  std::vector<std::int32_t> slot_of;   // By place; slot n is choice n % K of token n / K.
  std::vector<std::int32_t> place_of;  // By slot; -1 for none.
};

// Some rows of one expert.
struct Kernel::Block {
  std::int64_t expert;
  std::int64_t place;
  std::int64_t rows;
  bool split;  // Its products may be.
};

// An expert's matrix as it lies, in float32 where it is read.
class Kernel::Weight {
 public:
  Weight(const Kernel& kernel, const Call& call, const Inputs& inputs, format::Tensor tensor,
         std::int64_t expert);

  std::int64_t rows() const { return rows_; }
  std::int64_t columns() const { return columns_; }
  // Null where it is not packed.
  const PackedMatrix* packed() const { return is_packed_ ? &packed_ : nullptr; }
  // Rows that are worth to be read at a time: a copy of them stays in the cache.
  std::int64_t RowsAtOnce() const {
    return is_copied_ ? std::max(kCopyNumbers / columns_, std::int64_t{1}) : rows_;
  }
  // Reads some rows; they are valid until the next ones are read, which are as many or fewer.
  Status Read(std::int64_t first, std::int64_t rows, Matrix* matrix);

 private:
  const Kernel& kernel_;
  const Call& call_;
  std::int64_t rows_;
  std::int64_t columns_;
  std::uint32_t dtype_;
  bool is_packed_;
  bool is_copied_;
  const void* data_;  // Of one that is not packed.
  PackedMatrix packed_ = {};
  Buffer<float> copy_;
};

Kernel::Weight::Weight(const Kernel& kernel, const Call& call, const Inputs& inputs,
                       format::Tensor tensor, std::int64_t expert)
    : kernel_(kernel),
      call_(call),
      dtype_(kernel.node_.dtypes[tensor]),
      is_packed_(kernel.node_.node.packed),
      is_copied_(dtype_ != format::kFloat32) {
  const dynamo_moe_layer& layer = kernel.node_.layer;
  const auto of_expert = [&](std::uint32_t stored) -> const void* {
    const auto each = static_cast<format::Tensor>(stored);
    if (inputs.data[each] == nullptr || IsIgnored(layer, each)) {
      return nullptr;
    }
    const Shape shape = ShapeOf(layer, each);
    const std::int64_t elements = inputs.one_zero_point[each] ? 1 : shape.sizes[1] * shape.sizes[2];
    return static_cast<const char*>(inputs.data[each]) +
           expert * elements * format::kDataTypeBytes[kernel.node_.dtypes[each]];
  };
  const Shape shape = ShapeOf(layer, tensor);
  rows_ = shape.sizes[1];
  columns_ = shape.sizes[2] * FormatOf(layer).per_element;
  data_ = of_expert(tensor);
  if (!is_packed_) {
    return;
  }
  // What stores a weight follows its values.
  constexpr std::uint32_t scales = format::kW1Scales - format::kW1;
  constexpr std::uint32_t zero_points = format::kW1ZeroPoints - format::kW1;
  constexpr std::uint32_t global_scales = format::kW1GlobalScales - format::kW1;
  static_assert(format::kW2Scales - format::kW2 == scales &&
                format::kW2ZeroPoints - format::kW2 == zero_points &&
                format::kW2GlobalScales - format::kW2 == global_scales);
  packed_.weight_format = layer.weight_format;
  packed_.scales_dtype = layer.scales_dtype;
  packed_.rows = rows_;
  packed_.columns = columns_;
  packed_.block_rows = layer.block_rows == 0 ? rows_ : layer.block_rows;
  packed_.block_columns = layer.block_columns == 0 ? columns_ : layer.block_columns;
  packed_.values = static_cast<const std::uint8_t*>(data_);
  packed_.scales = of_expert(tensor + scales);
  packed_.zero_points = static_cast<const std::int8_t*>(of_expert(tensor + zero_points));
  packed_.one_zero_point = inputs.one_zero_point[tensor + zero_points];
  packed_.global_scales = static_cast<const float*>(of_expert(tensor + global_scales));
}

Status Kernel::Weight::Read(std::int64_t first, std::int64_t rows, Matrix* matrix) {
  const std::int64_t numbers = rows * columns_;
  *matrix = {nullptr, rows, columns_};
  if (!is_copied_) {
    matrix->data = static_cast<const float*>(data_) + first * columns_;
    return {};
  }
  if (copy_.data() == nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(copy_.Allocate(call_, static_cast<std::size_t>(numbers)));
  }
  matrix->data = copy_.data();
  if (is_packed_) {
    Decode(packed_, first, rows, copy_.data());
    return {};
  }
  const void* const narrow = static_cast<const std::uint16_t*>(data_) + first * columns_;
  return kernel_.widen_[dtype_](call_, {{narrow, rows, columns_, TypeOf(dtype_)}}, *matrix);
}

Status Kernel::Create(const Api& api, const Node& node, const OrtKernelInfo* info,
                      std::unique_ptr<Kernel>* kernel) {
  std::unique_ptr<Kernel> made(new Kernel(api));
  OrtMemoryInfo* memory = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.CreateCpuMemoryInfo(kArenaAllocator, kDefaultMemory, &memory)));
  made->memory_ = {memory, {api.ReleaseMemoryInfo}};
  DYNAMO_MOE_RETURN_IF_ERROR(ReadLayer(api, info, node, &made->node_));
  DYNAMO_MOE_RETURN_IF_ERROR(made->CreateOps(info));
  *kernel = std::move(made);
  return {};
}

Status Kernel::CreateOps(const OrtKernelInfo* info) {
  constexpr std::int32_t version = 13;
  const auto product = [&](bool right_transposed, bool bias, Op* op) {
    return op->Create(api_, info, "Gemm", version, {{"T", kFloatElements}},
                      {{"transA", false, 0, 0},
                       {"transB", false, right_transposed ? 1 : 0, 0},
                       {"alpha", true, 0, 1},
                       {"beta", true, 0, 1}},
                      bias ? 3 : 2);
  };
  const bool rows_of_w1 = !HasFlag(node_.layer, format::kW1Transposed);
  const bool rows_of_w2 = !HasFlag(node_.layer, format::kW2Transposed);
  in_columns_ = rows_of_w1 && rows_of_w2;
  few_rows_ = std::clamp(kFewNumbers / node_.layer.width, kLeastFewRows, kMostFewRows);
  DYNAMO_MOE_RETURN_IF_ERROR(product(rows_of_w1, node_.Has(format::kB1), &up_));
  DYNAMO_MOE_RETURN_IF_ERROR(product(rows_of_w2 && !in_columns_, node_.Has(format::kB2), &down_));
  if (node_.node.op == format::kDropless) {
    DYNAMO_MOE_RETURN_IF_ERROR(product(true, node_.Has(format::kRouterBias), &router_));
    if (!RanksByLogits(node_.layer)) {
      DYNAMO_MOE_RETURN_IF_ERROR(
          node_.layer.scoring == kSoftmax
              ? score_.Create(api_, info, "Softmax", version, {{"T", kFloatElements}},
                              {{"axis", false, -1, 0}}, 1)
              : score_.Create(api_, info, "Sigmoid", version, {{"T", kFloatElements}}, {}, 1));
    }
  }
  for (const std::uint32_t dtype : {format::kFloat16, format::kBfloat16}) {
    if (std::find(node_.dtypes.begin(), node_.dtypes.end(), dtype) == node_.dtypes.end()) {
      continue;
    }
    const auto cast = [&](ElementType from, ElementType to, Op* op) {
      return op->Create(api_, info, "Cast", version, {{"T1", from}, {"T2", to}},
                        {{"to", false, to, 0}}, 1);
    };
    DYNAMO_MOE_RETURN_IF_ERROR(cast(TypeOf(dtype), kFloatElements, &widen_[dtype]));
    DYNAMO_MOE_RETURN_IF_ERROR(cast(kFloatElements, TypeOf(dtype), &narrow_[dtype]));
  }
  return {};
}

Status Kernel::Widen(const Call& call, const Inputs& inputs, format::Tensor tensor,
                     std::int64_t count, Buffer<float>* copy, const float** numbers) const {
  const std::uint32_t dtype = node_.dtypes[tensor];
  const void* const data = inputs.data[tensor];
  if (dtype == format::kFloat32 || dtype == format::kNone) {
    *numbers = static_cast<const float*>(data);
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(copy->Allocate(call, static_cast<std::size_t>(count)));
  *numbers = copy->data();
  return widen_[dtype](call, {{data, 1, count, TypeOf(dtype)}}, {copy->data(), 1, count});
}

// The runtime writes to memory that a Matrix names.
// NOLINTBEGIN(readability-non-const-parameter,misc-const-correctness)

Status Kernel::Round(const Call& call, std::uint32_t dtype, std::int64_t count,
                     float* numbers) const {
  if (dtype == format::kFloat32) {
    return {};
  }
  Buffer<std::uint16_t> rounded;
  DYNAMO_MOE_RETURN_IF_ERROR(rounded.Allocate(call, static_cast<std::size_t>(count)));
  const Matrix narrow = {rounded.data(), 1, count, TypeOf(dtype)};
  const Matrix wide = {numbers, 1, count};
  DYNAMO_MOE_RETURN_IF_ERROR(narrow_[dtype](call, {wide}, narrow));
  return widen_[dtype](call, {narrow}, wide);
}

Status Kernel::Score(const Call& call, const Inputs& inputs, const float* x, Buffer<float>* logits,
                     Buffer<float>* scores) const {
  const std::int64_t tokens = inputs.tokens;
  const std::int64_t experts = node_.layer.experts;
  const std::int64_t width = node_.layer.width;
  const std::int64_t count = tokens * experts;
  Buffer<float> weight_copy;
  Buffer<float> bias_copy;
  const float* weight = nullptr;
  const float* bias = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kRouterWeight, experts * width, &weight_copy, &weight));
  DYNAMO_MOE_RETURN_IF_ERROR(Widen(call, inputs, format::kRouterBias, experts, &bias_copy, &bias));
  DYNAMO_MOE_RETURN_IF_ERROR(logits->Allocate(call, static_cast<std::size_t>(count)));
  const Matrix left = {x, tokens, width};
  const Matrix right = {weight, experts, width};
  const Matrix result = {logits->data(), tokens, experts};
  DYNAMO_MOE_RETURN_IF_ERROR(bias == nullptr
                                 ? router_(call, {left, right}, result)
                                 : router_(call, {left, right, {bias, 1, experts}}, result));
  if (HasFlag(node_.layer, format::kRoundedLogits)) {
    DYNAMO_MOE_RETURN_IF_ERROR(Round(call, node_.dtypes[format::kX], count, logits->data()));
  }
  if (RanksByLogits(node_.layer)) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(scores->Allocate(call, static_cast<std::size_t>(count)));
  return score_(call, {result}, {scores->data(), tokens, experts});
}

Status Kernel::Route(const Call& call, const Inputs& inputs, const float* x,
                     Routing* routing) const {
  const std::int64_t experts = node_.layer.experts;
  const std::int64_t top_k = node_.layer.top_k;
  const std::int64_t slots = inputs.tokens * top_k;
  Buffer<float> logits;
  Buffer<float> scores;
  Buffer<float> bias_copy;
  const float* bias = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Score(call, inputs, x, &logits, &scores));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kSelectionBias, experts, &bias_copy, &bias));
  DYNAMO_MOE_RETURN_IF_ERROR(
      routing->copied_weights.Allocate(call, static_cast<std::size_t>(slots)));
  float* const weights = routing->copied_weights.data();
  const std::int64_t pieces = (inputs.tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  DYNAMO_MOE_RETURN_IF_ERROR(
      call.ForEach(static_cast<std::size_t>(pieces), 0, [&](std::size_t piece) -> Status {
        Chooser choose(node_.layer, bias);
        const std::int64_t from = static_cast<std::int64_t>(piece) * kTokensAtOnce;
        const std::int64_t to = std::min(from + kTokensAtOnce, inputs.tokens);
        for (std::int64_t token = from; token < to; ++token) {
          const float* const scored = scores.data();
          choose(logits.data() + token * experts,
                 scored == nullptr ? nullptr : scored + token * experts,
                 routing->ids.data() + token * top_k, weights + token * top_k);
        }
        return {};
      }));
  routing->weights = weights;
  return HasFlag(node_.layer, format::kRoundedWeights)
             ? Round(call, node_.dtypes[format::kX], slots, weights)
             : Status();
}

Status Kernel::ReadRouting(const Call& call, const Inputs& inputs, Routing* routing) const {
  const std::int64_t slots = inputs.tokens * node_.layer.top_k;
  const void* const given = inputs.data[format::kExpertIds];
  const bool wide = node_.dtypes[format::kExpertIds] == format::kI64;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t id = wide ? static_cast<const std::int64_t*>(given)[slot]
                                 : static_cast<const std::int32_t*>(given)[slot];
    if (id < -1 || id >= std::int64_t{node_.layer.experts}) {
      return InvalidArgument("expert_ids must be in -1..", node_.layer.experts - 1, ", got ", id,
                             " for token ", slot / node_.layer.top_k);
    }
    routing->ids.data()[slot] = static_cast<std::int32_t>(id);
  }
  return Widen(call, inputs, format::kExpertWeights, slots, &routing->copied_weights,
               &routing->weights);
}

Status Kernel::Compute(OrtKernelContext* context) const {
  Call call(api_, context, memory_.get());
  DYNAMO_MOE_RETURN_IF_ERROR(call.Open());
  Inputs inputs;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadTensors(api_, context, node_, &inputs));
  OrtValue* output = nullptr;
  void* result = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(
      api_,
      api_.KernelContext_GetOutput(context, 0, inputs.sizes.data(), inputs.sizes.size(), &output)));
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.GetTensorMutableData(output, &result)));
  if (inputs.tokens == 0) {
    return {};
  }
  const std::int64_t width = node_.layer.width;
  const std::int64_t numbers = inputs.tokens * width;
  Buffer<float> x;
  Buffer<float> b1;
  Buffer<float> b2;
  DYNAMO_MOE_RETURN_IF_ERROR(Widen(call, inputs, format::kX, numbers, &x, &inputs.x));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kB1, node_.layer.experts * UpRows(), &b1, &inputs.b1));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kB2, node_.layer.experts * width, &b2, &inputs.b2));
  Routing routing;
  DYNAMO_MOE_RETURN_IF_ERROR(
      routing.ids.Allocate(call, static_cast<std::size_t>(inputs.tokens * node_.layer.top_k)));
  DYNAMO_MOE_RETURN_IF_ERROR(node_.node.op == format::kDropless
                                 ? Route(call, inputs, inputs.x, &routing)
                                 : ReadRouting(call, inputs, &routing));
  const bool narrow = node_.dtypes[format::kX] != format::kFloat32;
  Buffer<float> wide;
  if (narrow) {
    DYNAMO_MOE_RETURN_IF_ERROR(wide.Allocate(call, static_cast<std::size_t>(numbers)));
  }
  float* const y = narrow ? wide.data() : static_cast<float*>(result);
  const std::int64_t at_once = std::max(kLeastTokens, kResultNumbers / (node_.layer.top_k * width));
  for (std::int64_t first = 0; first < inputs.tokens; first += at_once) {
    const std::int64_t tokens = std::min(at_once, inputs.tokens - first);
    DYNAMO_MOE_RETURN_IF_ERROR(RunExperts(call, inputs, routing, first, tokens, y));
  }
  return narrow
             ? narrow_[node_.dtypes[format::kX]](
                   call, {{y, 1, numbers}}, {result, 1, numbers, TypeOf(node_.dtypes[format::kX])})
             : Status();
}

std::int64_t Kernel::BlockRows() const {
  const std::int64_t numbers =
      4 * std::int64_t{node_.layer.hidden} + 2 * std::int64_t{node_.layer.width};
  return std::clamp(kBlockNumbers / numbers, kLeastBlockRows, kMostBlockRows);
}

Status Kernel::RunExperts(const Call& call, const Inputs& inputs, const Routing& routing,
                          std::int64_t first, std::int64_t tokens, float* y) const {
  const std::int64_t top_k = node_.layer.top_k;
  const std::int64_t experts = node_.layer.experts;
  const std::int32_t* const ids = routing.ids.data() + first * top_k;
  Slots slots;
  slots.first = first;
  slots.starts.assign(static_cast<std::size_t>(experts) + 1, 0);
  const auto count = static_cast<std::size_t>(tokens * top_k);
  for (std::size_t slot = 0; slot < count; ++slot) {
    if (ids[slot] >= 0) {
      ++slots.starts[static_cast<std::size_t>(ids[slot]) + 1];
    }
  }
  std::partial_sum(slots.starts.begin(), slots.starts.end(), slots.starts.begin());
  const auto used = static_cast<std::size_t>(slots.starts.back());
  slots.slot_of.resize(used);
  slots.place_of.assign(count, -1);
  std::vector<std::int64_t> next(slots.starts.begin(), slots.starts.end() - 1);
  for (std::size_t slot = 0; slot < count; ++slot) {
    if (ids[slot] >= 0) {
      const auto place = static_cast<std::int32_t>(next[static_cast<std::size_t>(ids[slot])]++);
      slots.slot_of[static_cast<std::size_t>(place)] = static_cast<std::int32_t>(slot);
      slots.place_of[slot] = place;
    }
  }
  std::vector<Block> blocks;
  const std::int64_t most = BlockRows();
  for (std::int64_t expert = 0; expert < experts; ++expert) {
    const std::int64_t end = slots.starts[static_cast<std::size_t>(expert) + 1];
    for (std::int64_t place = slots.starts[static_cast<std::size_t>(expert)]; place < end;
         place += most) {
      blocks.push_back({expert, place, std::min(most, end - place), false});
    }
  }
  for (Block& block : blocks) {
    block.split = blocks.size() < kFewBlocks;
  }
  // The largest first, so that threads end at about the same time.
  std::stable_sort(blocks.begin(), blocks.end(),
                   [](const Block& a, const Block& b) { return a.rows > b.rows; });
  Buffer<float> results;
  DYNAMO_MOE_RETURN_IF_ERROR(results.Allocate(call, used * node_.layer.width));
  if (!blocks.empty()) {
    DYNAMO_MOE_RETURN_IF_ERROR(call.ForEach(blocks.size(), blocks.size(), [&](std::size_t index) {
      return RunBlock(call, inputs, routing, slots, blocks[index], results.data());
    }));
  }
  const std::int64_t pieces = (tokens + kTokensAtOnce - 1) / kTokensAtOnce;
  return call.ForEach(static_cast<std::size_t>(pieces), 0, [&](std::size_t piece) -> Status {
    const std::int64_t from = static_cast<std::int64_t>(piece) * kTokensAtOnce;
    for (std::int64_t token = from; token < std::min(from + kTokensAtOnce, tokens); ++token) {
      Combine(inputs, routing, slots, results.data(), token, y);
    }
    return {};
  });
}

Status Kernel::GatherRows(const Call& call, const Inputs& inputs, const Routing& routing,
                          const Slots& slots, const Block& block, float* rows) const {
  const std::int64_t width = node_.layer.width;
  const bool weighted = HasFlag(node_.layer, format::kWeightOnInput);
  const auto token_at = [&](std::int64_t row) {
    return slots.first +
           slots.slot_of[static_cast<std::size_t>(block.place + row)] / node_.layer.top_k;
  };
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const float* const x = inputs.x + token_at(row) * width;
    if (!weighted) {
      std::copy(x, x + width, rows + row * width);
      continue;
    }
    const std::int32_t slot = slots.slot_of[static_cast<std::size_t>(block.place + row)];
    const float weight = routing.weights[slots.first * node_.layer.top_k + slot];
    std::transform(x, x + width, rows + row * width,
                   [weight](float number) { return weight * number; });
  }
  if (weighted || node_.dtypes[format::kX] != node_.layer.experts_dtype) {
    DYNAMO_MOE_RETURN_IF_ERROR(Round(call, node_.layer.experts_dtype, block.rows * width, rows));
  }
  if (!HasFlag(node_.layer, format::kRmsNorm)) {
    return {};
  }
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const float* const x = inputs.x + token_at(row) * width;
    const float squares = std::inner_product(x, x + width, x, 0.0F);
    const float scale = 1 / std::sqrt(squares / static_cast<float>(width) + node_.layer.norm_eps);
    std::transform(rows + row * width, rows + (row + 1) * width, rows + row * width,
                   [scale](float number) { return scale * number; });
  }
  return {};
}

Status Kernel::Multiply(const Call& call, const Op& product, bool transposed, bool split,
                        Weight* weight, const float* bias, const Matrix& rows,
                        const Matrix& result) {
  const bool few = rows.rows <= kMostFewRows && !transposed;
  const auto* const numbers = static_cast<const float*>(rows.data);
  auto* const sums = static_cast<float*>(const_cast<void*>(result.data));
  if (few && rows.rows <= kMostRowsInRegisters && weight->packed() != nullptr) {
    MultiplyFewRows(*weight->packed(), bias, numbers, rows.rows, sums);
    return {};
  }
  const std::int64_t at_once = few ? weight->RowsAtOnce() : weight->rows();
  for (std::int64_t first = 0; first < weight->rows(); first += at_once) {
    Matrix part;
    DYNAMO_MOE_RETURN_IF_ERROR(
        weight->Read(first, std::min(at_once, weight->rows() - first), &part));
    if (!few) {
      return bias == nullptr ? product(call, {rows, part}, result)
                             : product(call, {rows, part, {bias, 1, result.columns}}, result);
    }
    const std::int64_t of_piece =
        split ? std::max(kPieceNumbers / part.columns, std::int64_t{1}) : part.rows;
    const std::int64_t pieces = (part.rows + of_piece - 1) / of_piece;
    const auto multiply = [&](std::size_t piece) -> Status {
      const std::int64_t from = static_cast<std::int64_t>(piece) * of_piece;
      const std::int64_t column = first + from;
      MultiplyFewRows(static_cast<const float*>(part.data) + from * part.columns,
                      std::min(of_piece, part.rows - from), part.columns,
                      bias == nullptr ? nullptr : bias + column, numbers, rows.rows, sums + column,
                      result.columns);
      return {};
    };
    DYNAMO_MOE_RETURN_IF_ERROR(call.ForEach(static_cast<std::size_t>(pieces), 0, multiply));
  }
  return {};
}

Status Kernel::RunBlock(const Call& call, const Inputs& inputs, const Routing& routing,
                        const Slots& slots, const Block& block, float* results) const {
  const std::int64_t width = node_.layer.width;
  const std::int64_t hidden = node_.layer.hidden;
  const std::int64_t up_rows = UpRows();
  const std::int64_t count = block.rows;
  Buffer<float> rows;
  DYNAMO_MOE_RETURN_IF_ERROR(rows.Allocate(call, static_cast<std::size_t>(count * width)));
  float* const x = rows.data();
  DYNAMO_MOE_RETURN_IF_ERROR(GatherRows(call, inputs, routing, slots, block, x));
  if (in_columns_ && count > few_rows_) {
    return RunColumns(call, inputs, block, x, results + block.place * width);
  }
  Buffer<float> buffer;
  DYNAMO_MOE_RETURN_IF_ERROR(
      buffer.Allocate(call, static_cast<std::size_t>(count * (up_rows + hidden))));
  float* const z = buffer.data();
  float* const h = z + count * up_rows;
  Weight w1(*this, call, inputs, format::kW1, block.expert);
  DYNAMO_MOE_RETURN_IF_ERROR(Multiply(call, up_, HasFlag(node_.layer, format::kW1Transposed),
                                      block.split, &w1, BiasOf(inputs.b1, block.expert, up_rows),
                                      {x, count, width}, {z, count, up_rows}));
  Activate(node_.layer, count, z, h);
  DYNAMO_MOE_RETURN_IF_ERROR(Round(call, node_.layer.experts_dtype, hidden * count, h));
  Weight w2(*this, call, inputs, format::kW2, block.expert);
  return Multiply(call, down_, HasFlag(node_.layer, format::kW2Transposed), block.split, &w2,
                  BiasOf(inputs.b2, block.expert, width), {h, count, hidden},
                  {results + block.place * width, count, width});
}

Status Kernel::RunColumns(const Call& call, const Inputs& inputs, const Block& block,
                          const float* x, float* results) const {
  const std::int64_t width = node_.layer.width;
  const std::int64_t hidden = node_.layer.hidden;
  const std::int64_t up_rows = UpRows();
  const auto for_columns = [&](const auto& run) -> Status {
    for (std::int64_t first = 0; first < block.rows; first += kColumnsAtOnce) {
      DYNAMO_MOE_RETURN_IF_ERROR(run(first, std::min(kColumnsAtOnce, block.rows - first)));
    }
    return {};
  };
  Buffer<float> buffer;
  DYNAMO_MOE_RETURN_IF_ERROR(buffer.Allocate(
      call, static_cast<std::size_t>(block.rows * (hidden + std::max(up_rows, width)))));
  float* const h = buffer.data();
  float* const products = h + block.rows * hidden;
  // Both hold kColumnsAtOnce columns behind one another, row by row: those from column `first` on
  // begin behind `first` times as many numbers as a column has.
  const auto multiply = [&](const Op& product, format::Tensor tensor, const float* bias,
                            const auto& right_of) -> Status {
    Weight weight(*this, call, inputs, tensor, block.expert);
    std::int64_t at_once = weight.RowsAtOnce();
    if (block.rows > kColumnsAtOnce) {
      at_once = std::min(at_once, std::max(kReusedNumbers / weight.columns(), std::int64_t{1}));
    }
    for (std::int64_t from = 0; from < weight.rows(); from += at_once) {
      Matrix left;
      DYNAMO_MOE_RETURN_IF_ERROR(weight.Read(from, std::min(at_once, weight.rows() - from), &left));
      DYNAMO_MOE_RETURN_IF_ERROR(for_columns([&](std::int64_t first, std::int64_t columns) {
        const Matrix right = right_of(first, columns);
        const Matrix result = {products + first * weight.rows() + from * columns, left.rows,
                               columns};
        return bias == nullptr ? product(call, {left, right}, result)
                               : product(call, {left, right, {bias + from, left.rows, 1}}, result);
      }));
    }
    return {};
  };
  DYNAMO_MOE_RETURN_IF_ERROR(multiply(up_, format::kW1, BiasOf(inputs.b1, block.expert, up_rows),
                                      [&](std::int64_t first, std::int64_t columns) -> Matrix {
                                        return {x + first * width, columns, width};
                                      }));
  DYNAMO_MOE_RETURN_IF_ERROR(for_columns([&](std::int64_t first, std::int64_t columns) -> Status {
    ActivateColumns(node_.layer, columns, products + first * up_rows, h + first * hidden);
    return {};
  }));
  DYNAMO_MOE_RETURN_IF_ERROR(Round(call, node_.layer.experts_dtype, hidden * block.rows, h));
  DYNAMO_MOE_RETURN_IF_ERROR(multiply(down_, format::kW2, BiasOf(inputs.b2, block.expert, width),
                                      [&](std::int64_t first, std::int64_t columns) -> Matrix {
                                        return {h + first * hidden, hidden, columns};
                                      }));
  return for_columns([&](std::int64_t first, std::int64_t columns) -> Status {
    Transpose(products + first * width, width, columns, results + first * width);
    return {};
  });
}

// NOLINTEND(readability-non-const-parameter,misc-const-correctness)

void Kernel::Combine(const Inputs& inputs, const Routing& routing, const Slots& slots,
                     const float* results, std::int64_t token, float* y) const {
  const std::int64_t width = node_.layer.width;
  const std::int64_t top_k = node_.layer.top_k;
  const bool weighted = !HasFlag(node_.layer, format::kWeightOnInput);
  const float* const x = inputs.x + (slots.first + token) * width;
  float* const sum = y + (slots.first + token) * width;
  std::fill(sum, sum + width, 0.0F);
  for (std::int64_t slot = token * top_k; slot < (token + 1) * top_k; ++slot) {
    const std::int32_t place = slots.place_of[static_cast<std::size_t>(slot)];
    if (place >= 0) {
      const float* const result = results + place * width;
      const float weight = weighted ? routing.weights[slots.first * top_k + slot] : 1;
      for (std::int64_t i = 0; i < width; ++i) {
        sum[i] += weight * result[i];
      }
    }
  }
  if (HasFlag(node_.layer, format::kResidual)) {
    std::transform(x, x + width, sum, sum, std::plus<>());
  }
}

}  // namespace dynamo_moe::onnxruntime
