#include "bundle/description.h"

#include <cstdio>
#include <cstring>
#include <string_view>

#include "bundle/expression.h"
#include "bundle/layer.h"

namespace dynamo_moe {
namespace {

// Appends JSON to a text, with commas between the items of objects and arrays.
class Json {
 public:
  explicit Json(std::string* text) : text_(*text) {}

  template <typename Function>
  void Object(const Function& fill) {
    Enclose('{', fill, '}');
  }

  // An array with an item for each element, which `write` writes.
  template <typename Range, typename Function>
  void Array(const Range& elements, const Function& write) {
    Enclose(
        '[',
        [&] {
          for (const auto& element : elements) {
            Separate();
            write(element);
          }
        },
        ']');
  }

  template <typename Range>
  void Numbers(const Range& elements) {
    Array(elements, [this](const auto& element) { Number(element); });
  }

  Json& Key(const char* name) {
    Separate();
    String(name);
    text_ += ':';
    return *this;
  }

  // The text must have no control characters; a bundle's has been checked.
  void String(std::string_view text) {
    text_ += '"';
    for (const char each : text) {
      if (each == '"' || each == '\\') {
        text_ += '\\';
      }
      text_ += each;
    }
    text_ += '"';
  }

  template <typename Integer>
  void Number(Integer value) {
    text_ += std::to_string(value);
  }

  // All digits of a float, which must be finite; an integral one is written as 1.0.
  void Float(float value) {
    char digits[32];
    std::snprintf(digits, sizeof(digits), "%.17g", static_cast<double>(value));
    text_ += digits;
    text_ += std::strpbrk(digits, ".e") == nullptr ? ".0" : "";
  }

  void Literal(const char* text) { text_ += text; }

 private:
  template <typename Function>
  void Enclose(char open, const Function& fill, char close) {
    text_ += open;
    first_ = true;
    fill();
    text_ += close;
    first_ = false;
  }

  void Separate() {
    if (!first_) {
      text_ += ',';
    }
    first_ = false;
  }

  std::string& text_;
  bool first_ = true;
};

// Writes a program's tables. Shared records are written once and referred to by index, so that the
// text's size is proportional to the program's.
class ProgramWriter {
 public:
  ProgramWriter(const Program& program, std::size_t offset, Json* json)
      : program_(program), offset_(offset), json_(*json) {}

  void Write() {
    json_.Object([this] {
      json_.Key("offset").Number(offset_);
      json_.Key("bytes").Number(program_.bytes().size());
      json_.Key("architecture").Number(program_.architecture());
      json_.Key("layer");
      Layer(program_.layer());
      json_.Key("ranges").Array(program_.ranges(), [this](const auto& each) { Range(each); });
      json_.Key("buffers").Array(program_.buffers(), [this](const auto& each) { Buffer(each); });
      json_.Key("launches").Array(program_.launches(), [this](const auto& each) { Launch(each); });
      json_.Key("tensor_maps").Array(program_.tensor_maps(), [this](const auto& each) {
        TensorMap(each);
      });
      json_.Key("kernels").Array(program_.kernels(), [this](const auto& each) { Kernel(each); });
      json_.Key("expressions").Array(program_.expressions(), [this](const auto& each) {
        Expression(each);
      });
    });
  }

 private:
  void Layer(const dynamo_moe_layer& layer) {
    json_.Object([&] {
      json_.Key("operator").Number(layer.op);
      json_.Key("tokens_dtype").Number(layer.tokens_dtype);
      json_.Key("experts_dtype").Number(layer.experts_dtype);
      json_.Key("routing_dtype").Number(layer.routing_dtype);
      json_.Key("weights_dtype").Number(layer.weights_dtype);
      json_.Key("flags").Number(layer.flags);
      json_.Key("activation").Number(layer.activation);
      json_.Key("scoring").Number(layer.scoring);
      json_.Key("experts").Number(layer.experts);
      json_.Key("top_k").Number(layer.top_k);
      json_.Key("width").Number(layer.width);
      json_.Key("hidden").Number(layer.hidden);
      json_.Key("routed_scaling").Float(layer.routed_scaling);
      json_.Key("alpha").Float(layer.alpha);
      json_.Key("limit").Float(layer.limit);
      json_.Key("norm_eps").Float(layer.norm_eps);
    });
  }

  void Range(const format::Range& range) {
    json_.Object([&] {
      json_.Key("first").Number(range.first_tokens);
      json_.Key("last").Number(range.last_tokens);
      json_.Key("first_buffer").Number(range.first_buffer);
      json_.Key("buffers").Number(range.buffers);
      json_.Key("first_launch").Number(range.first_launch);
      json_.Key("launches").Number(range.launches);
    });
  }

  void Buffer(const format::Buffer& buffer) {
    json_.Object([&] {
      json_.Key("name").String(program_.text(buffer.name));
      json_.Key("size").Number(buffer.size);
    });
  }

  void Launch(const format::Launch& launch) {
    json_.Object([&] {
      json_.Key("kernel").Number(launch.kernel);
      json_.Key("arguments").Array(program_.arguments(launch), [this](const auto& each) {
        Argument(each);
      });
      json_.Key("grid").Numbers(launch.grid);
    });
  }

  void Argument(const format::Argument& argument) {
    json_.Object([&] {
      json_.Key("kind").String(format::kArgumentKindNames[argument.kind]);
      json_.Key("value");
      if (argument.kind == format::kNull) {
        json_.Literal("null");
      } else if (argument.kind == format::kTensor) {
        json_.String(format::kTensorNames[argument.index]);
      } else {
        json_.Number(argument.index);
      }
    });
  }

  void TensorMap(const format::TensorMap& map) {
    json_.Object([&] {
      json_.Key("tensor").String(format::kTensorNames[map.tensor]);
      json_.Key("dtype").Number(map.type);
      json_.Key("swizzle").Number(map.swizzle);
      json_.Key("sizes").Numbers(Span<std::uint64_t>(map.sizes, map.rank));
      json_.Key("strides").Numbers(Span<std::uint64_t>(map.strides, map.rank));
      json_.Key("box").Numbers(Span<std::uint32_t>(map.box, map.rank));
    });
  }

  void Kernel(const format::Kernel& kernel) {
    const auto* const image = static_cast<const char*>(program_.image(kernel));
    json_.Object([&] {
      json_.Key("name").String(program_.text(kernel.name));
      json_.Key("description").String(program_.text(kernel.description));
      json_.Key("image_offset").Number(offset_ + (image - program_.bytes().data()));
      json_.Key("image_bytes").Number(kernel.image_size);
      json_.Key("num_warps").Number(kernel.warps);
      json_.Key("shared_memory").Number(kernel.shared_memory);
      json_.Key("dependent_launch");
      json_.Literal((kernel.flags & format::kDependentLaunch) != 0 ? "true" : "false");
      json_.Key("registers").Number(kernel.registers);
      json_.Key("local_memory").Number(kernel.local_memory);
    });
  }

  void Expression(const format::Expression& expression) {
    const Span<format::Instruction> instructions = program_.instructions(expression);
    json_.Object([&] {
      json_.Key("text").String(ExpressionText(instructions));
      json_.Key("instructions").Array(instructions, [this](const format::Instruction& each) {
        json_.Literal("[");
        json_.Number(static_cast<std::uint32_t>(each.opcode));
        json_.Literal(",");
        json_.Number(each.value);
        json_.Literal("]");
      });
    });
  }

  const Program& program_;
  std::size_t offset_;
  Json& json_;
};

}  // namespace

std::string DescribeLayer(const dynamo_moe_layer& layer) {
  std::string text;
  Json json(&text);
  json.Object([&] {
    const bool router = layer.op == format::kDropless;
    json.Key("operator").String(router ? "dropless" : "experts");
    for (const format::Size& size : format::kSizes) {
      json.Key(size.name).Number(SizeOf(layer, size));
    }
    json.Key("tokens_dtype").String(format::kDataTypeNames[layer.tokens_dtype]);
    json.Key("experts_dtype").String(format::kDataTypeNames[layer.experts_dtype]);
    json.Key("routing_dtype").String(format::kDataTypeNames[layer.routing_dtype]);
    json.Key("weights_dtype").String(format::kDataTypeNames[layer.weights_dtype]);
    const auto flag = [&json](const char* name, bool set) {
      json.Key(name).Literal(set ? "true" : "false");
    };
    flag("b1", (layer.flags & format::kHasB1) != 0);
    flag("b2", (layer.flags & format::kHasB2) != 0);
    flag("tf32", (layer.flags & format::kHasTf32) != 0);
    for (const format::Option& option : format::kOptions) {
      if (option.router && !router) {
        continue;
      }
      if (option.bit != 0) {
        flag(option.name, CodeOf(layer, option) != 0);
      } else if (option.type == format::Option::kName) {
        json.Key(option.name).String(option.names[CodeOf(layer, option)]);
      } else if (HasEffect(layer, option)) {
        json.Key(option.name).Float(NumberOf(layer, option));
      }
    }
  });
  return text;
}

Status DescribeBundle(const Bundle& bundle, std::string* text) {
  Json json(text);
  *text = "[";
  for (std::size_t index = 0; index < bundle.programs(); ++index) {
    Program program;
    DYNAMO_MOE_RETURN_IF_ERROR(bundle.Parse(index, &program));
    *text += index == 0 ? "" : ",";
    ProgramWriter(program, bundle.offset(index), &json).Write();
  }
  *text += "]";
  return {};
}

}  // namespace dynamo_moe
