#include "bundle/description.h"

#include <charconv>
#include <iterator>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "bundle/expression.h"
#include "bundle/layer.h"

namespace dynamo_moe {
namespace {

// A string, or a number with all its digits. A bundle's text has no control characters and its
// floats are finite: both have been checked.
template <typename T>
std::string Json(const T& value) {
  if constexpr (std::is_convertible_v<T, std::string_view>) {
    std::string text = "\"";
    for (const char each : std::string_view(value)) {
      text += each == '"' || each == '\\' ? "\\" : "";
      text += each;
    }
    return text + '"';
  } else if constexpr (std::is_same_v<T, bool>) {
    return value ? "true" : "false";
  } else if constexpr (std::is_same_v<T, float>) {
    // As a double, because that is what a reader of JSON makes of it. Unlike printf, to_chars does
    // not write the decimal comma of the host program's locale.
    char digits[32];
    const double number = value;
    const std::string text(digits, std::to_chars(digits, std::end(digits), number).ptr);
    return text.find_first_of(".e") == std::string::npos ? text + ".0" : text;
  } else {
    return std::to_string(value);
  }
}

using Fields = std::vector<std::pair<const char*, std::string>>;

std::string Object(const Fields& fields) {
  std::string text = "{";
  for (const auto& [name, value] : fields) {
    text += Text(text.size() > 1 ? "," : "", Json(name), ":", value);
  }
  return text + '}';
}

template <typename Elements, typename Function>
std::string Array(const Elements& elements, const Function& describe) {
  std::string text = "[";
  for (const auto& element : elements) {
    text += Text(text.size() > 1 ? "," : "", describe(element));
  }
  return text + ']';
}

template <typename Elements>
std::string Numbers(const Elements& elements) {
  return Array(elements, [](auto element) { return Json(element); });
}

std::string Describe(const dynamo_moe_layer& layer) {
  return Object({{"operator", Json(layer.op)},
                 {"tokens_dtype", Json(layer.tokens_dtype)},
                 {"experts_dtype", Json(layer.experts_dtype)},
                 {"routing_dtype", Json(layer.routing_dtype)},
                 {"weights_dtype", Json(layer.weights_dtype)},
                 {"flags", Json(layer.flags)},
                 {"activation", Json(layer.activation)},
                 {"scoring", Json(layer.scoring)},
                 {"experts", Json(layer.experts)},
                 {"top_k", Json(layer.top_k)},
                 {"width", Json(layer.width)},
                 {"hidden", Json(layer.hidden)},
                 {"routed_scaling", Json(layer.routed_scaling)},
                 {"alpha", Json(layer.alpha)},
                 {"limit", Json(layer.limit)},
                 {"norm_eps", Json(layer.norm_eps)},
                 {"group_scoring", Json(layer.group_scoring)},
                 {"n_group", Json(layer.n_group)},
                 {"topk_group", Json(layer.topk_group)},
                 {"selection_dtype", Json(layer.selection_dtype)},
                 {"resident_experts", Json(layer.resident_experts)},
                 {"weight_format", Json(layer.weight_format)},
                 {"block_rows", Json(layer.block_rows)},
                 {"block_columns", Json(layer.block_columns)},
                 {"scales_dtype", Json(layer.scales_dtype)},
                 {"zero_points", Json(layer.zero_points)}});
}

std::string Describe(const format::Range& range) {
  return Object({{"first", Json(range.first_tokens)},
                 {"last", Json(range.last_tokens)},
                 {"first_buffer", Json(range.first_buffer)},
                 {"buffers", Json(range.buffers)},
                 {"first_launch", Json(range.first_launch)},
                 {"launches", Json(range.launches)},
                 {"wave_launches", Json(range.wave_launches)},
                 {"epilogue_launches", Json(range.epilogue_launches)},
                 {"waves", range.wave_launches == 0 ? "null" : Json(range.waves)}});
}

std::string Describe(const format::Argument& argument) {
  std::string value = Json(argument.index);
  if (argument.kind == format::kNull) {
    value = "null";
  } else if (argument.kind == format::kTensor) {
    value = Json(format::kTensorNames[argument.index]);
  }
  return Object({{"kind", Json(format::kArgumentKindNames[argument.kind])}, {"value", value}});
}

std::string Describe(const format::TensorMap& map) {
  const bool is_tensor = map.kind == format::kTensor;
  return Object({{"tensor", is_tensor ? Json(format::kTensorNames[map.index]) : Json(map.index)},
                 {"dtype", Json(map.type)},
                 {"swizzle", Json(map.swizzle)},
                 {"sizes", Numbers(Span<std::uint64_t>(map.sizes, map.rank))},
                 {"strides", Numbers(Span<std::uint64_t>(map.strides, map.rank))},
                 {"box", Numbers(Span<std::uint32_t>(map.box, map.rank))}});
}

// Shared records are described once and referred to by index; a string is repeated, but has at most
// kMaxText bytes. A record thus takes at most 17 KiB of the text: a kernel with two such strings,
// each byte of which is escaped.
std::string Describe(const Program& program, std::size_t offset) {
  const auto describe = [](const auto& record) { return Describe(record); };
  const auto buffer = [&](const format::Buffer& each) {
    return Object({{"name", Json(program.text(each.name))}, {"size", Json(each.size)}});
  };
  const auto state = [&](const format::Buffer& each) {
    return Object({{"name", Json(program.text(each.name))},
                   {"size", Json(each.size)},
                   {"zeroed", Json((each.flags & format::kZeroed) != 0)}});
  };
  const auto launch = [&](const format::Launch& each) {
    return Object({{"kernel", Json(each.kernel)},
                   {"arguments", Array(program.arguments(each), describe)},
                   {"grid", Numbers(each.grid)},
                   {"side", Json((each.flags & format::kOnSide) != 0)},
                   {"after", Json(each.after)}});
  };
  const auto kernel = [&](const format::Kernel& each) {
    const auto* const image = static_cast<const char*>(program.image(each));
    return Object({{"name", Json(program.text(each.name))},
                   {"description", Json(program.text(each.description))},
                   {"image_offset", Json(offset + (image - program.bytes().data()))},
                   {"image_bytes", Json(each.image_size)},
                   {"num_warps", Json(each.warps)},
                   {"shared_memory", Json(each.shared_memory)},
                   {"dependent_launch", Json((each.flags & format::kDependentLaunch) != 0)},
                   {"registers", Json(each.registers)},
                   {"local_memory", Json(each.local_memory)}});
  };
  const auto expression = [&](const format::Expression& each) {
    const Span<format::Instruction> code = program.instructions(each);
    const auto instruction = [](const format::Instruction& step) {
      return Text("[", step.opcode, ",", step.value, "]");
    };
    return Object(
        {{"text", Json(ExpressionText(code))}, {"instructions", Array(code, instruction)}});
  };
  return Object({{"offset", Json(offset)},
                 {"bytes", Json(program.bytes().size())},
                 {"architecture", Json(program.architecture())},
                 {"layer", Describe(program.layer())},
                 {"ranges", Array(program.ranges(), describe)},
                 {"state", Array(program.state(), state)},
                 {"buffers", Array(program.buffers(), buffer)},
                 {"launches", Array(program.launches(), launch)},
                 {"tensor_maps", Array(program.tensor_maps(), describe)},
                 {"kernels", Array(program.kernels(), kernel)},
                 {"expressions", Array(program.expressions(), expression)}});
}

}  // namespace

std::string DescribeLayer(const dynamo_moe_layer& layer) {
  const bool router = layer.op == format::kDropless;
  Fields fields = {{"operator", Json(router ? "dropless" : "experts")}};
  for (const format::Size& size : format::kSizes) {
    fields.emplace_back(size.name, Json(SizeOf(layer, size)));
  }
  fields.insert(fields.end(),
                {{"tokens_dtype", Json(format::kDataTypeNames[layer.tokens_dtype])},
                 {"experts_dtype", Json(format::kDataTypeNames[layer.experts_dtype])},
                 {"routing_dtype", Json(format::kDataTypeNames[layer.routing_dtype])},
                 {"weights_dtype", Json(format::kDataTypeNames[layer.weights_dtype])},
                 {"selection_dtype", Json(format::kDataTypeNames[layer.selection_dtype])},
                 {"weight_format", Json(FormatOf(layer).name)},
                 {"b1", Json((layer.flags & format::kHasB1) != 0)},
                 {"b2", Json((layer.flags & format::kHasB2) != 0)},
                 {"tf32", Json((layer.flags & format::kHasTf32) != 0)}});
  std::uint64_t w1_bytes = 0;
  std::uint64_t w2_bytes = 0;
  if (WeightBytes(layer, &w1_bytes, &w2_bytes)) {
    fields.emplace_back("w1_bytes", Json(w1_bytes));
    fields.emplace_back("w2_bytes", Json(w2_bytes));
  }
  if (FormatOf(layer).IsPacked()) {
    fields.emplace_back("block_rows", Json(layer.block_rows));
    fields.emplace_back("block_columns", Json(layer.block_columns));
    fields.emplace_back("scales_dtype", Json(format::kDataTypeNames[layer.scales_dtype]));
    fields.emplace_back("zero_points", Json(format::kZeroPointsNames[layer.zero_points]));
  }
  if (layer.resident_experts != 0) {
    fields.emplace_back("resident_experts", Json(layer.resident_experts));
  }
  for (const format::Option& option : format::kOptions) {
    if (option.router && !router) {
      continue;
    }
    if (option.bit != 0) {
      fields.emplace_back(option.name, Json(CodeOf(layer, option) != 0));
    } else if (option.type == format::Option::kName) {
      fields.emplace_back(option.name, Json(option.names[CodeOf(layer, option)]));
    } else if (HasEffect(layer, option)) {
      fields.emplace_back(option.name, option.type == format::Option::kInt
                                           ? Json(CodeOf(layer, option))
                                           : Json(NumberOf(layer, option)));
    }
  }
  return Object(fields);
}

std::string DescribeBundle(const Bundle& bundle) {
  return Array(bundle.programs(), [](const Bundle::Entry& each) {
    Program program;
    // Opening the bundle has checked it already.
    const Status status = Program::Parse(each.bytes.data(), each.bytes.size(), &program);
    return status.ok() ? Describe(program, each.offset) : "null";
  });
}

}  // namespace dynamo_moe
