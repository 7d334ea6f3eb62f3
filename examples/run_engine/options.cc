#include "options.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <fstream>
#include <sstream>
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

// Token ids between commas or blanks.
std::vector<std::int64_t> parse_ids(std::string_view option, std::string text) {
  std::replace(text.begin(), text.end(), ',', ' ');
  std::istringstream words(text);
  std::vector<std::int64_t> ids;
  for (std::string word; words >> word;) {
    ids.push_back(parse_integer<std::int64_t>(option, word, 0));
  }
  if (ids.empty()) {
    throw UsageError(std::string(option) + " needs at least one token id");
  }
  return ids;
}

// A prompt of each line.
void read_prompts(std::string_view option, const std::string& path,
                  std::vector<std::vector<std::int64_t>>& prompts) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    prompts.push_back(parse_ids(option, line));
  }
  if (prompts.empty()) {
    throw UsageError("no prompt can be read from " + path);
  }
}

// Options that only measuring has, and those that only writing text has.
constexpr std::array kMeasuring{"--shape",  "--batch",      "--input",      "--output", "--profile",
                                "--warmup", "--iterations", "--cuda-graph", "--top-k"};
constexpr std::array kWriting{"--steps", "--end"};

void check_kind(const Options& options, const std::vector<std::string>& given) {
  const bool writes = !options.prompts.empty();
  const auto is_of_the_other_kind = [&](const std::string& option) {
    const auto has = [&](const auto& names) {
      return std::find(names.begin(), names.end(), option) != names.end();
    };
    return writes ? has(kMeasuring) : has(kWriting);
  };
  const auto found = std::find_if(given.begin(), given.end(), is_of_the_other_kind);
  if (found != given.end()) {
    throw UsageError(*found + (writes ? " does not go with --prompt" : " needs --prompt"));
  }
}

}  // namespace

Options parse_options(const std::vector<std::string>& arguments) {
  Options options;
  std::vector<std::string> given;
  for (std::size_t at = 0; at < arguments.size(); ++at) {
    const std::string& option = arguments[at];
    given.push_back(option);
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
    } else if (option == "--nccl-id") {
      options.nccl_id = value();
    } else if (option == "--nccl-wait") {
      options.nccl_wait = parse_integer<int>(option, value(), 0);
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
    } else if (option == "--prompt") {
      options.prompts.push_back(parse_ids(option, value()));
    } else if (option == "--prompt-file") {
      read_prompts(option, value(), options.prompts);
    } else if (option == "--steps") {
      options.steps = parse_integer<int>(option, value(), 1);
    } else if (option == "--end") {
      options.ends.push_back(parse_integer<std::int64_t>(option, value(), 0));
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
  if (options.nccl_id.empty() &&
      std::find(given.begin(), given.end(), "--nccl-wait") != given.end()) {
    throw UsageError("--nccl-wait needs --nccl-id");
  }
  check_kind(options, given);
  return options;
}

const char* usage() {
  return "Usage: run_engine MODEL.engine [OPTIONS]\n"
         "\n"
         "Runs an engine of TensorRT or TensorRT for RTX, and measures it, or writes text.\n"
         "\n"
         "  --plugin LIBRARY     load libdynamo_moe.so before the engine\n"
         "\n"
         "As a rank of several, started by torchrun, mpirun or srun; MODEL.engine then stands for\n"
         "MODEL.rank0.engine and so on:\n"
         "  --nccl-id FILE       where rank 0 leaves NCCL's id for the others\n"
         "  --nccl-wait SECONDS  how long ranks wait for each other; default: 60\n"
         "\n"
         "To measure it:\n"
         "  --shape NAME=SHAPE   shape of an input, such as x=16x64; default: the profile's usual\n"
         "  --batch N            first size of every other input, where it is symbolic\n"
         "  --profile N          optimisation profile; default: 0\n"
         "  --input NAME=FILE    raw content of an input; default: random, zeros for integers\n"
         "  --output NAME=FILE   where to write the raw content of an output\n"
         "  --top-k N            print the N largest values of each row of each output\n"
         "  --warmup N           runs before those that are measured; default: 10\n"
         "  --iterations N       runs that are measured; default: 100\n"
         "  --cuda-graph         capture a run in a CUDA graph, and measure its replays\n"
         "\n"
         "To write text with a language model, the most likely token each time:\n"
         "  --prompt IDS         token ids, such as 1,17,42; once for each row of the batch\n"
         "  --prompt-file FILE   a prompt of each line\n"
         "  --steps N            the most tokens that follow a prompt; default: 32\n"
         "  --end ID             a token that ends a row; once for each\n";
}

}  // namespace run_engine
