#include "options.h"

#include <algorithm>
#include <charconv>
#include <string_view>
#include <utility>

namespace run_engine {
namespace {

template <typename Integer>
Integer parse_integer(std::string_view option, const std::string& text, Integer smallest) {
  Integer value{};
  const char* end = text.c_str() + text.size();
  const auto [stopped, error] = std::from_chars(text.c_str(), end, value);
  if (error != std::errc{} || stopped != end || value < smallest) {
    throw UsageError(std::string(option) + " needs a number of at least " +
                     std::to_string(smallest) + ", got \"" + text + '"');
  }
  return value;
}

// Splits NAME=VALUE at its first "=".
std::pair<std::string, std::string> split(std::string_view option, const std::string& text) {
  const std::size_t at = text.find('=');
  if (at == 0 || at == std::string::npos || at + 1 == text.size()) {
    throw UsageError(std::string(option) + " needs NAME=VALUE, got \"" + text + '"');
  }
  return {text.substr(0, at), text.substr(at + 1)};
}

std::vector<std::int64_t> parse_shape(std::string_view option, const std::string& text) {
  std::vector<std::int64_t> shape;
  std::size_t begin = 0;
  while (begin <= text.size()) {
    const std::size_t end = std::min(text.find('x', begin), text.size());
    shape.push_back(parse_integer<std::int64_t>(option, text.substr(begin, end - begin), 0));
    begin = end + 1;
  }
  return shape;
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const std::string& option = arguments[at];
    const auto value = [&]() -> const std::string& {
      if (at + 1 == arguments.size()) {
        throw UsageError(option + " needs a value");
      }
      return arguments[++at];
    };
    if (option == "--help" || option == "-h") {
      options.help = true;
    } else if (option == "--plugin") {
      options.plugin = value();
    } else if (option == "--shape") {
      auto [name, shape] = split(option, value());
      options.shapes[name] = parse_shape(option, shape);
    } else if (option == "--batch") {
      options.batch = parse_integer<std::int64_t>(option, value(), 1);
    } else if (option == "--input") {
      options.input_files.insert(split(option, value()));
    } else if (option == "--output") {
      options.output_files.insert(split(option, value()));
    } else if (option == "--profile") {
      options.profile = parse_integer<std::int32_t>(option, value(), 0);
    } else if (option == "--warmup") {
      options.warmup = parse_integer<int>(option, value(), 0);
    } else if (option == "--iterations") {
      options.iterations = parse_integer<int>(option, value(), 1);
    } else if (option == "--cuda-graph") {
      options.cuda_graph = true;
    } else if (option == "--top-k") {
      options.top_k = parse_integer<int>(option, value(), 1);
    } else if (option.size() > 1 && option[0] == '-') {
      throw UsageError("unknown option " + option);
    } else if (options.engine.empty()) {
      options.engine = option;
    } else {
      throw UsageError("one engine at a time, got " + options.engine + " and " + option);
    }
  }
  if (options.engine.empty() && !options.help) {
    throw UsageError("name an engine");
  }
  return options;
}

const char* usage() {
  return "Usage: run_engine MODEL.engine [OPTIONS]\n"
         "\n"
         "Runs an engine of TensorRT or TensorRT for RTX, and measures it.\n"
         "\n"
         "  --plugin LIBRARY     load libdynamo_moe.so before the engine\n"
         "  --shape NAME=SHAPE   shape of an input, such as x=16x64; default: the profile's usual\n"
         "  --batch N            first size of every other input, where it is symbolic\n"
         "  --profile N          optimisation profile; default: 0\n"
         "  --input NAME=FILE    raw content of an input; default: random, zeros for integers\n"
         "  --output NAME=FILE   where to write the raw content of an output\n"
         "  --top-k N            print the N largest values of each row of each output\n"
         "  --warmup N           runs before those that are measured; default: 10\n"
         "  --iterations N       runs that are measured; default: 100\n"
         "  --cuda-graph         capture a run in a CUDA graph, and measure its replays\n";
}

}  // namespace run_engine
