#include "onnxruntime/kernel.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <iterator>
#include <limits>
#include <numeric>

#include "onnxruntime/few_rows.h"
#include "onnxruntime/router.h"

namespace dynamo_moe::onnxruntime {
namespace {

constexpr std::int64_t kMaxSize = std::numeric_limits<std::int32_t>::max();
// A block of rows has at most as many numbers in its buffers, and a call's results as many in all.
constexpr std::int64_t kBlockNumbers = std::int64_t{1} << 22;
constexpr std::int64_t kResultNumbers = std::int64_t{1} << 25;
constexpr std::int64_t kLeastBlockRows = 32;
constexpr std::int64_t kMostBlockRows = 512;
constexpr std::int64_t kLeastTokens = 1024;
// A part of a product's result stays in the cache while the runtime sums parts of its depth; the
// runtime takes as many columns at a time.
constexpr std::int64_t kPartNumbers = std::int64_t{1} << 16;
constexpr std::int64_t kPartColumns = 128;
// From more rows on, to copy an expert's weights costs less than to sum columns.
constexpr std::int64_t kMostColumns = 64;
// Tokens of a piece of work that is little for each.
constexpr std::int64_t kTokensAtOnce = 8;

std::uint32_t DtypeCode(ElementType type) {
  switch (type) {
    case kFloatElements:
      return format::kFloat32;
    case kFloat16Elements:
      return format::kFloat16;
    case kBfloat16Elements:
      return format::kBfloat16;
    case kInt32Elements:
      return format::kI32;
    case kInt64Elements:
      return format::kI64;
    default:
      return format::kNone;
  }
}

ElementType TypeOf(std::uint32_t dtype) {
  return dtype == format::kFloat16 ? kFloat16Elements : kBfloat16Elements;
}

std::string ShapeText(const std::vector<std::int64_t>& sizes) {
  std::string text = "[";
  for (const std::int64_t size : sizes) {
    text += Text(text.size() == 1 ? "" : ", ", size);
  }
  return text + "]";
}

Status CheckDtype(format::Tensor tensor, ElementType type) {
  const std::uint32_t dtype = DtypeCode(type);
  const bool is_int = dtype == format::kI32 || dtype == format::kI64;
  if (dtype != format::kNone && is_int == (tensor == format::kExpertIds)) {
    return {};
  }
  return InvalidArgument(NameOf(tensor), " must be ",
                         tensor == format::kExpertIds
                             ? "int32 or int64"
                             : "float32, float16 or bfloat16 in the library's operator",
                         ", got ONNX's type ", static_cast<std::int32_t>(type));
}

struct Description {
  ElementType type = kUndefined;
  std::vector<std::int64_t> sizes;
};

Status Describe(const Api& api, const OrtValue* value, Description* description) {
  OrtTensorTypeAndShapeInfo* made = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorTypeAndShape(value, &made)));
  const Owned<OrtTensorTypeAndShapeInfo> info(made, {api.ReleaseTensorTypeAndShapeInfo});
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorElementType(made, &description->type)));
  std::size_t rank = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetDimensionsCount(made, &rank)));
  description->sizes.resize(rank);
  return Take(api, api.GetDimensions(made, description->sizes.data(), rank));
}

// Writes a matrix [columns, rows] as rows [rows, columns], in parts that stay in the cache.
void Transpose(const float* columns, std::int64_t rows, std::int64_t width, float* result) {
  constexpr std::int64_t part = 16;
  for (std::int64_t from = 0; from < width; from += part) {
    const std::int64_t to = std::min(from + part, width);
    for (std::int64_t row = 0; row < rows; ++row) {
      for (std::int64_t column = from; column < to; ++column) {
        result[row * width + column] = columns[column * rows + row];
      }
    }
  }
}

const float* BiasOf(const float* all, std::int64_t expert, std::int64_t count) {
  return all == nullptr ? nullptr : all + expert * count;
}

}  // namespace

// A call's inputs.
struct Kernel::Inputs {
  std::array<const void*, format::kTensors> data = {};
  std::vector<std::int64_t> sizes;  // Of x.
  std::int64_t tokens = 0;
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
};

Status Kernel::Create(const Api& api, format::Operator op, const OrtKernelInfo* info,
                      std::unique_ptr<Kernel>* kernel) {
  std::unique_ptr<Kernel> made(new Kernel(api, op));
  OrtMemoryInfo* memory = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.CreateCpuMemoryInfo(kArenaAllocator, kDefaultMemory, &memory)));
  made->memory_ = {memory, {api.ReleaseMemoryInfo}};
  DYNAMO_MOE_RETURN_IF_ERROR(made->ReadAttributes(info));
  DYNAMO_MOE_RETURN_IF_ERROR(made->ReadDtypes(info));
  DYNAMO_MOE_RETURN_IF_ERROR(made->CreateOps(info));
  *kernel = std::move(made);
  return {};
}

Status Kernel::ReadAttributes(const OrtKernelInfo* info) {
  layer_.op = node_.op;
  const auto read = [&](const char* name, std::int64_t most, std::uint32_t* value) {
    std::int64_t given = 0;
    if (!Take(api_, api_.KernelInfoGetAttribute_int64(info, name, &given)).ok()) {
      return InvalidArgument("attribute ", name, " is missing");
    }
    if (given < 1 || given > most) {
      return InvalidArgument("attribute ", name, " must be in 1..", most, ", got ", given);
    }
    *value = static_cast<std::uint32_t>(given);
    return Status();
  };
  // Twice a size still fits.
  DYNAMO_MOE_RETURN_IF_ERROR(read("num_experts", kMaxSize, &layer_.experts));
  DYNAMO_MOE_RETURN_IF_ERROR(read("in_features", kMaxSize, &layer_.width));
  DYNAMO_MOE_RETURN_IF_ERROR(read("hidden_features", kMaxSize / 2, &layer_.hidden));
  const bool router = node_.op == format::kDropless;
  DYNAMO_MOE_RETURN_IF_ERROR(read("top_k", router ? layer_.experts : kMaxSize, &layer_.top_k));
  for (const format::Option& option : format::kOptions) {
    if (HasOption(node_, option)) {
      DYNAMO_MOE_RETURN_IF_ERROR(ReadOption(info, option));
    }
  }
  return CompleteOptions(&layer_);
}

Status Kernel::ReadOption(const OrtKernelInfo* info, const format::Option& option) {
  if (option.type == format::Option::kFloat) {
    float number = option.initial;
    const Status found =
        Take(api_, api_.KernelInfoGetAttribute_float(info, option.attribute, &number));
    number = found.ok() ? number : option.initial;
    SetNumber(option, number, &layer_);
    return CheckNumber(option, number);
  }
  auto code = static_cast<std::uint32_t>(option.initial);
  if (option.type == format::Option::kName) {
    std::size_t size = 0;
    if (Take(api_, api_.KernelInfoGetAttribute_string(info, option.attribute, nullptr, &size))
            .ok()) {
      std::string text(size, '\0');
      DYNAMO_MOE_RETURN_IF_ERROR(Take(
          api_, api_.KernelInfoGetAttribute_string(info, option.attribute, text.data(), &size)));
      text.resize(std::strlen(text.c_str()));
      DYNAMO_MOE_RETURN_IF_ERROR(ReadName(option, text, &code));
    }
  } else {
    std::int64_t given = code;
    const bool found =
        Take(api_, api_.KernelInfoGetAttribute_int64(info, option.attribute, &given)).ok();
    const auto least = static_cast<std::int64_t>(option.least);
    const std::int64_t most = option.type == format::Option::kBool ? 1 : kMaxSize;
    if (found && (given < least || given > most)) {
      return InvalidArgument("attribute ", option.attribute, " must be in ", least, "..", most,
                             ", got ", given);
    }
    code = found ? static_cast<std::uint32_t>(given) : code;
  }
  SetCode(option, code, &layer_);
  return {};
}

Status Kernel::ReadDtypes(const OrtKernelInfo* info) {
  const Span<format::Tensor> order = InputsOf(node_);
  std::size_t count = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.KernelInfo_GetInputCount(info, &count)));
  for (std::size_t i = 0; i < std::min(count, order.size()); ++i) {
    OrtTypeInfo* made = nullptr;
    const Status found = Take(api_, api_.KernelInfo_GetInputTypeInfo(info, i, &made));
    const Owned<OrtTypeInfo> type_info(made, {api_.ReleaseTypeInfo});
    if (!found.ok() || made == nullptr) {
      if (IsOptional(order[i])) {
        continue;  // It has an empty name.
      }
      return found.ok() ? InvalidArgument(NameOf(order[i]), " has no type") : found;
    }
    const OrtTensorTypeAndShapeInfo* tensor = nullptr;
    ElementType type = kUndefined;
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.CastTypeInfoToTensorInfo(made, &tensor)));
    if (tensor != nullptr) {
      DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.GetTensorElementType(tensor, &type)));
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckDtype(order[i], type));
    dtypes_[order[i]] = DtypeCode(type);
  }
  for (const format::Tensor tensor : {format::kW2, format::kB1, format::kB2}) {
    if (Has(tensor) && dtypes_[tensor] != dtypes_[format::kW1]) {
      return InvalidArgument(NameOf(tensor), " must be ", DtypeName(dtypes_[format::kW1]),
                             ", as w1 is, got ", DtypeName(dtypes_[tensor]));
    }
  }
  layer_.selection_dtype = dtypes_[format::kSelectionBias];
  layer_.weight_format = PlainFormatOf(dtypes_[format::kW1]);
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
  const bool b1 = Has(format::kB1);
  const bool b2 = Has(format::kB2);
  DYNAMO_MOE_RETURN_IF_ERROR(product(true, b1, &up_columns_));
  DYNAMO_MOE_RETURN_IF_ERROR(product(false, b2, &down_columns_));
  DYNAMO_MOE_RETURN_IF_ERROR(product(!HasFlag(layer_, format::kW1Transposed), b1, &up_rows_));
  DYNAMO_MOE_RETURN_IF_ERROR(product(!HasFlag(layer_, format::kW2Transposed), b2, &down_rows_));
  DYNAMO_MOE_RETURN_IF_ERROR(activation_.Create(api_, info, layer_));
  if (node_.op == format::kDropless) {
    DYNAMO_MOE_RETURN_IF_ERROR(product(true, Has(format::kRouterBias), &router_));
    if (!RanksByLogits(layer_)) {
      DYNAMO_MOE_RETURN_IF_ERROR(
          layer_.scoring == kSoftmax
              ? score_.Create(api_, info, "Softmax", version, {{"T", kFloatElements}},
                              {{"axis", false, -1, 0}}, 1)
              : score_.Create(api_, info, "Sigmoid", version, {{"T", kFloatElements}}, {}, 1));
    }
  }
  for (const std::uint32_t dtype : {format::kFloat16, format::kBfloat16}) {
    if (std::find(dtypes_.begin(), dtypes_.end(), dtype) == dtypes_.end()) {
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

Status Kernel::CheckShape(format::Tensor tensor, const std::vector<std::int64_t>& sizes,
                          const std::vector<std::int64_t>& x) const {
  const Shape shape = ShapeOf(layer_, tensor);
  if (shape.rank != 0) {
    const std::vector<std::int64_t> wanted(shape.sizes, shape.sizes + shape.rank);
    return sizes == wanted ? Status()
                           : InvalidArgument(NameOf(tensor), " must have shape ", ShapeText(wanted),
                                             ", got ", ShapeText(sizes));
  }
  const std::int64_t last = tensor == format::kX ? layer_.width : layer_.top_k;
  const bool same = sizes.size() == x.size() && !sizes.empty() && sizes.back() == last &&
                    std::equal(sizes.begin(), sizes.end() - 1, x.begin());
  return same ? Status()
              : InvalidArgument(NameOf(tensor), " must have shape [..., ", last,
                                "] with the tokens of x, ", ShapeText(x), "; got ",
                                ShapeText(sizes));
}

Status Kernel::ReadInputs(const Call& call, Inputs* inputs) const {
  const Span<format::Tensor> order = InputsOf(node_);
  for (std::size_t i = 0; i < order.size(); ++i) {
    const format::Tensor tensor = order[i];
    if (!Has(tensor)) {
      continue;
    }
    const OrtValue* value = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.KernelContext_GetInput(call.context(), i, &value)));
    if (value == nullptr) {
      return InvalidArgument(NameOf(tensor), " is missing");
    }
    Description description;
    DYNAMO_MOE_RETURN_IF_ERROR(Describe(api_, value, &description));
    if (DtypeCode(description.type) != dtypes_[tensor]) {
      return InvalidArgument(NameOf(tensor), " must be ", DtypeName(dtypes_[tensor]),
                             ", got ONNX's type ", static_cast<std::int32_t>(description.type));
    }
    if (tensor == format::kX) {
      inputs->sizes = description.sizes;
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckShape(tensor, description.sizes, inputs->sizes));
    void* data = nullptr;
    // The interface has no other way to read; nothing is written.
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api_, api_.GetTensorMutableData(const_cast<OrtValue*>(value), &data)));
    inputs->data[tensor] = data;
  }
  inputs->tokens = std::accumulate(inputs->sizes.begin(), inputs->sizes.end() - 1, std::int64_t{1},
                                   std::multiplies<>());
  if (inputs->tokens > kMaxSize / layer_.top_k) {
    return InvalidArgument("x must have at most ", kMaxSize / layer_.top_k, " tokens, got ",
                           inputs->tokens);
  }
  return {};
}

Status Kernel::Widen(const Call& call, const Inputs& inputs, format::Tensor tensor,
                     std::int64_t count, Buffer<float>* copy, const float** numbers) const {
  const std::uint32_t dtype = dtypes_[tensor];
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
  const std::int64_t experts = layer_.experts;
  const std::int64_t width = layer_.width;
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
  if (HasFlag(layer_, format::kRoundedLogits)) {
    DYNAMO_MOE_RETURN_IF_ERROR(Round(call, dtypes_[format::kX], count, logits->data()));
  }
  if (RanksByLogits(layer_)) {
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(scores->Allocate(call, static_cast<std::size_t>(count)));
  return score_(call, {result}, {scores->data(), tokens, experts});
}

Status Kernel::Route(const Call& call, const Inputs& inputs, const float* x,
                     Routing* routing) const {
  const std::int64_t experts = layer_.experts;
  const std::int64_t top_k = layer_.top_k;
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
        Chooser choose(layer_, bias);
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
  return HasFlag(layer_, format::kRoundedWeights) ? Round(call, dtypes_[format::kX], slots, weights)
                                                  : Status();
}

Status Kernel::ReadRouting(const Call& call, const Inputs& inputs, Routing* routing) const {
  const std::int64_t slots = inputs.tokens * layer_.top_k;
  const void* const given = inputs.data[format::kExpertIds];
  const bool wide = dtypes_[format::kExpertIds] == format::kI64;
  for (std::int64_t slot = 0; slot < slots; ++slot) {
    const std::int64_t id = wide ? static_cast<const std::int64_t*>(given)[slot]
                                 : static_cast<const std::int32_t*>(given)[slot];
    if (id < -1 || id >= std::int64_t{layer_.experts}) {
      return InvalidArgument("expert_ids must be in -1..", layer_.experts - 1, ", got ", id,
                             " for token ", slot / layer_.top_k);
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
  DYNAMO_MOE_RETURN_IF_ERROR(ReadInputs(call, &inputs));
  OrtValue* output = nullptr;
  void* result = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(
      api_,
      api_.KernelContext_GetOutput(context, 0, inputs.sizes.data(), inputs.sizes.size(), &output)));
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api_, api_.GetTensorMutableData(output, &result)));
  if (inputs.tokens == 0) {
    return {};
  }
  const std::int64_t width = layer_.width;
  const std::int64_t numbers = inputs.tokens * width;
  Buffer<float> x;
  Buffer<float> b1;
  Buffer<float> b2;
  DYNAMO_MOE_RETURN_IF_ERROR(Widen(call, inputs, format::kX, numbers, &x, &inputs.x));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kB1, layer_.experts * UpRows(), &b1, &inputs.b1));
  DYNAMO_MOE_RETURN_IF_ERROR(
      Widen(call, inputs, format::kB2, layer_.experts * width, &b2, &inputs.b2));
  Routing routing;
  DYNAMO_MOE_RETURN_IF_ERROR(
      routing.ids.Allocate(call, static_cast<std::size_t>(inputs.tokens * layer_.top_k)));
  DYNAMO_MOE_RETURN_IF_ERROR(node_.op == format::kDropless ? Route(call, inputs, inputs.x, &routing)
                                                           : ReadRouting(call, inputs, &routing));
  const bool narrow = dtypes_[format::kX] != format::kFloat32;
  Buffer<float> wide;
  if (narrow) {
    DYNAMO_MOE_RETURN_IF_ERROR(wide.Allocate(call, static_cast<std::size_t>(numbers)));
  }
  float* const y = narrow ? wide.data() : static_cast<float*>(result);
  const std::int64_t at_once = std::max(kLeastTokens, kResultNumbers / (layer_.top_k * width));
  for (std::int64_t first = 0; first < inputs.tokens; first += at_once) {
    const std::int64_t tokens = std::min(at_once, inputs.tokens - first);
    DYNAMO_MOE_RETURN_IF_ERROR(RunExperts(call, inputs, routing, first, tokens, y));
  }
  return narrow ? narrow_[dtypes_[format::kX]](call, {{y, 1, numbers}},
                                               {result, 1, numbers, TypeOf(dtypes_[format::kX])})
                : Status();
}

std::int64_t Kernel::BlockRows() const {
  const std::int64_t numbers = 4 * std::int64_t{layer_.hidden} + 2 * std::int64_t{layer_.width};
  return std::clamp(kBlockNumbers / numbers, kLeastBlockRows, kMostBlockRows);
}

Status Kernel::RunExperts(const Call& call, const Inputs& inputs, const Routing& routing,
                          std::int64_t first, std::int64_t tokens, float* y) const {
  const std::int64_t top_k = layer_.top_k;
  const std::int64_t experts = layer_.experts;
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
      blocks.push_back({expert, place, std::min(most, end - place)});
    }
  }
  Buffer<float> results;
  DYNAMO_MOE_RETURN_IF_ERROR(results.Allocate(call, used * layer_.width));
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
  const std::int64_t width = layer_.width;
  const bool weighted = HasFlag(layer_, format::kWeightOnInput);
  const auto token_at = [&](std::int64_t row) {
    return slots.first + slots.slot_of[static_cast<std::size_t>(block.place + row)] / layer_.top_k;
  };
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const float* const x = inputs.x + token_at(row) * width;
    if (!weighted) {
      std::copy(x, x + width, rows + row * width);
      continue;
    }
    const std::int32_t slot = slots.slot_of[static_cast<std::size_t>(block.place + row)];
    const float weight = routing.weights[slots.first * layer_.top_k + slot];
    std::transform(x, x + width, rows + row * width,
                   [weight](float number) { return weight * number; });
  }
  if (weighted || dtypes_[format::kX] != dtypes_[format::kW1]) {
    DYNAMO_MOE_RETURN_IF_ERROR(Round(call, dtypes_[format::kW1], block.rows * width, rows));
  }
  if (!HasFlag(layer_, format::kRmsNorm)) {
    return {};
  }
  for (std::int64_t row = 0; row < block.rows; ++row) {
    const float* const x = inputs.x + token_at(row) * width;
    const float squares = std::inner_product(x, x + width, x, 0.0F);
    const float scale = 1 / std::sqrt(squares / static_cast<float>(width) + layer_.norm_eps);
    std::transform(rows + row * width, rows + (row + 1) * width, rows + row * width,
                   [scale](float number) { return scale * number; });
  }
  return {};
}

Status Kernel::ReadExpert(const Call& call, const Inputs& inputs, format::Tensor weight,
                          std::int64_t expert, Buffer<float>* copy, Matrix* matrix) const {
  const Shape shape = ShapeOf(layer_, weight);
  const std::uint32_t dtype = dtypes_[weight];
  const std::int64_t count = shape.sizes[1] * shape.sizes[2];
  const void* const all = inputs.data[weight];
  *matrix = {nullptr, shape.sizes[1], shape.sizes[2]};
  if (dtype == format::kFloat32) {
    matrix->data = static_cast<const float*>(all) + expert * count;
    return {};
  }
  const void* const narrow = static_cast<const std::uint16_t*>(all) + expert * count;
  DYNAMO_MOE_RETURN_IF_ERROR(copy->Allocate(call, static_cast<std::size_t>(count)));
  matrix->data = copy->data();
  return widen_[dtype](call, {{narrow, matrix->rows, matrix->columns, TypeOf(dtype)}}, *matrix);
}

Status Kernel::MultiplyColumns(const Call& call, const Op& product, const Matrix& matrix,
                               const float* bias, const Matrix& columns, const Matrix& result) {
  const std::int64_t at_once = kPartNumbers / std::min(result.columns, kPartColumns);
  for (std::int64_t row = 0; row < matrix.rows; row += at_once) {
    const std::int64_t rows = std::min(at_once, matrix.rows - row);
    const Matrix left = {static_cast<const float*>(matrix.data) + row * matrix.columns, rows,
                         matrix.columns};
    const Matrix part = {static_cast<const float*>(result.data) + row * result.columns, rows,
                         result.columns};
    DYNAMO_MOE_RETURN_IF_ERROR(bias == nullptr
                                   ? product(call, {left, columns}, part)
                                   : product(call, {left, columns, {bias + row, rows, 1}}, part));
  }
  return {};
}

Status Kernel::MultiplyRows(const Call& call, format::Tensor weight, const Matrix& matrix,
                            const float* bias, const Matrix& rows, const Matrix& result) const {
  const bool up = weight == format::kW1;
  if (rows.rows <= kMostFewRows &&
      !HasFlag(layer_, up ? format::kW1Transposed : format::kW2Transposed)) {
    MultiplyFewRows(static_cast<const float*>(matrix.data), matrix.rows, matrix.columns, bias,
                    static_cast<const float*>(rows.data), rows.rows,
                    static_cast<float*>(const_cast<void*>(result.data)));
    return {};
  }
  const Op& product = up ? up_rows_ : down_rows_;
  return bias == nullptr ? product(call, {rows, matrix}, result)
                         : product(call, {rows, matrix, {bias, 1, result.columns}}, result);
}

Status Kernel::RunBlock(const Call& call, const Inputs& inputs, const Routing& routing,
                        const Slots& slots, const Block& block, float* results) const {
  const std::int64_t width = layer_.width;
  Buffer<float> buffer;
  DYNAMO_MOE_RETURN_IF_ERROR(buffer.Allocate(
      call, static_cast<std::size_t>(block.rows * (UpRows() + layer_.hidden + 2 * width))));
  float* const x = buffer.data();
  float* const rest = x + block.rows * width;
  float* const result = results + block.place * width;
  DYNAMO_MOE_RETURN_IF_ERROR(GatherRows(call, inputs, routing, slots, block, x));
  const bool columns = block.rows > kMostFewRows && block.rows <= kMostColumns &&
                       !HasFlag(layer_, format::kW1Transposed) &&
                       !HasFlag(layer_, format::kW2Transposed);
  return columns ? RunColumns(call, inputs, block, x, rest, result)
                 : RunRows(call, inputs, block, x, rest, result);
}

Status Kernel::RunColumns(const Call& call, const Inputs& inputs, const Block& block,
                          const float* x, float* buffer, float* results) const {
  const std::int64_t width = layer_.width;
  const std::int64_t hidden = layer_.hidden;
  const std::int64_t up_rows = UpRows();
  const std::int64_t count = block.rows;
  float* const z = buffer;
  float* const h = z + count * up_rows;
  float* const y = h + count * hidden;
  Buffer<float> w1_copy;
  Matrix w1;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadExpert(call, inputs, format::kW1, block.expert, &w1_copy, &w1));
  DYNAMO_MOE_RETURN_IF_ERROR(MultiplyColumns(call, up_columns_, w1,
                                             BiasOf(inputs.b1, block.expert, up_rows),
                                             {x, count, width}, {z, up_rows, count}));
  DYNAMO_MOE_RETURN_IF_ERROR(activation_.OfColumns(call, count, z, h));
  DYNAMO_MOE_RETURN_IF_ERROR(Round(call, dtypes_[format::kW1], hidden * count, h));
  Buffer<float> w2_copy;
  Matrix w2;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadExpert(call, inputs, format::kW2, block.expert, &w2_copy, &w2));
  DYNAMO_MOE_RETURN_IF_ERROR(MultiplyColumns(call, down_columns_, w2,
                                             BiasOf(inputs.b2, block.expert, width),
                                             {h, hidden, count}, {y, width, count}));
  Transpose(y, count, width, results);
  return {};
}

Status Kernel::RunRows(const Call& call, const Inputs& inputs, const Block& block, const float* x,
                       float* buffer, float* results) const {
  const std::int64_t width = layer_.width;
  const std::int64_t hidden = layer_.hidden;
  const std::int64_t up_rows = UpRows();
  const std::int64_t count = block.rows;
  float* const z = buffer;
  float* const h = z + count * up_rows;
  Buffer<float> w1_copy;
  Matrix w1;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadExpert(call, inputs, format::kW1, block.expert, &w1_copy, &w1));
  DYNAMO_MOE_RETURN_IF_ERROR(MultiplyRows(call, format::kW1, w1,
                                          BiasOf(inputs.b1, block.expert, up_rows),
                                          {x, count, width}, {z, count, up_rows}));
  DYNAMO_MOE_RETURN_IF_ERROR(activation_.OfRows(call, count, z, h));
  DYNAMO_MOE_RETURN_IF_ERROR(Round(call, dtypes_[format::kW1], hidden * count, h));
  Buffer<float> w2_copy;
  Matrix w2;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadExpert(call, inputs, format::kW2, block.expert, &w2_copy, &w2));
  return MultiplyRows(call, format::kW2, w2, BiasOf(inputs.b2, block.expert, width),
                      {h, count, hidden}, {results, count, width});
}

// NOLINTEND(readability-non-const-parameter,misc-const-correctness)

void Kernel::Combine(const Inputs& inputs, const Routing& routing, const Slots& slots,
                     const float* results, std::int64_t token, float* y) const {
  const std::int64_t width = layer_.width;
  const std::int64_t top_k = layer_.top_k;
  const bool weighted = !HasFlag(layer_, format::kWeightOnInput);
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
  if (HasFlag(layer_, format::kResidual)) {
    std::transform(x, x + width, sum, sum, std::plus<>());
  }
}

}  // namespace dynamo_moe::onnxruntime
