// What examples/run_engine does without a GPU. Prints a JSON object for test_run_engine.py: the
// options of each command line given, or its error, and what results.cc computes.

#include <cmath>
#include <cstdio>
#include <cstring>
#include <limits>
#include <string>
#include <vector>

#include "options.h"
#include "ranks.h"
#include "results.h"
#include "text.h"

namespace {

using run_engine::Format;

template <typename T>
std::vector<std::byte> bytes(const std::vector<T>& values) {
  std::vector<std::byte> data(values.size() * sizeof(T));
  std::memcpy(data.data(), values.data(), data.size());
  return data;
}

void print(const char* name, const std::vector<double>& values) {
  std::printf("\"%s\": [", name);
  for (std::size_t at = 0; at < values.size(); ++at) {
    std::printf("%s%.17g", at == 0 ? "" : ", ", values[at]);
  }
  std::printf("],\n");
}

}  // namespace

int main(int count, char** values) {
  std::printf("{\n");
  if (count > 1) {
    try {
      const run_engine::Options options =
          run_engine::parse_options(std::vector<std::string>(values + 1, values + count));
      if (!options.nccl_id.empty()) {
        const run_engine::Place place = run_engine::place_of_process();
        print("place", {double(place.rank), double(place.ranks), double(place.local)});
        const run_engine::Communicator made(place, options.nccl_id, options.nccl_wait);
        const auto* numbers = static_cast<const int*>(made.get());
        print("communicator", {double(numbers[0]), double(numbers[1])});
        std::printf("\"file\": \"%s\",\n",
                    run_engine::rank_path(options.engine, place.rank).c_str());
      }
      for (const auto& [name, shape] : options.shapes) {
        print(("shape " + name).c_str(), {shape.begin(), shape.end()});
      }
      for (const auto& [name, file] : options.input_files) {
        std::printf("\"input %s\": \"%s\",\n", name.c_str(), file.c_str());
      }
      std::printf("\"engine\": \"%s\", \"plugin\": \"%s\", \"batch\": %ld,\n",
                  options.engine.c_str(), options.plugin.c_str(),
                  static_cast<long>(options.batch.value_or(-1)));
      for (std::size_t at = 0; at < options.prompts.size(); ++at) {
        print(("prompt " + std::to_string(at)).c_str(),
              {options.prompts[at].begin(), options.prompts[at].end()});
      }
      if (!options.prompts.empty()) {
        print("ends", {options.ends.begin(), options.ends.end()});
        print("steps", {double(options.steps)});
      }
      std::printf("\"runs\": [%d, %d, %d, %d, %d]}\n", options.profile, options.warmup,
                  options.iterations, options.cuda_graph ? 1 : 0, options.top_k);
    } catch (const std::runtime_error& error) {
      std::string text = error.what();
      for (char& each : text) {
        each = each == '"' ? '\'' : each;
      }
      std::printf("\"error\": \"%s\"}\n", text.c_str());
    }
    return 0;
  }
  // 1, -2, the largest, the smallest normal and subnormal.
  print("float16",
        decode(Format::kFloat16, bytes<std::uint16_t>({0x3C00, 0xC000, 0x7BFF, 0x0400, 0x0001})));
  print("bfloat16", decode(Format::kBfloat16, bytes<std::uint16_t>({0x3F80, 0xC000, 0x4049})));
  print("encoded int64",
        decode(Format::kInt64, run_engine::encode(Format::kInt64, {7, 1LL << 40})));
  print("encoded int32", decode(Format::kInt32, run_engine::encode(Format::kInt32, {7, 0})));
  // Two rows, of which the second ends with the first token that follows.
  const auto print_ids = [](const char* name, const run_engine::Text::Ids& ids) {
    print(name, {ids.begin(), ids.end()});
  };
  run_engine::Text text({{5, 9, 17}, {40}}, {2, 3});
  print_ids("text", text.ids(0));
  print_ids("mask", text.mask(text.length() + 1));
  print_ids("positions", text.positions(0));
  text.append({8, 3});
  text.append({9, 9});
  print_ids("new", text.ids(4));
  print_ids("new positions", text.positions(4));
  print_ids("longer mask", text.mask(text.length()));
  print_ids("written 0", text.written(0));
  print_ids("written 1", text.written(1));
  print("ended", {double(text.has_ended())});
  text.append({2, 9});
  print("all ended", {double(text.has_ended())});
  print("int64", decode(Format::kInt64, bytes<std::int64_t>({-3, 1LL << 40})));
  print("int8", decode(Format::kInt8, bytes<std::int8_t>({-3, 127})));
  print("bool", decode(Format::kBool, bytes<std::uint8_t>({0, 1})));
  const auto special = decode(Format::kFloat16, bytes<std::uint16_t>({0x7C00, 0xFC00, 0x7E00}));
  print("special",
        {double(std::isinf(special[0]) && special[0] > 0),
         double(std::isinf(special[1]) && special[1] < 0), double(std::isnan(special[2]))});
  for (const Format format :
       {Format::kFloat32, Format::kFloat16, Format::kBfloat16, Format::kInt32}) {
    print((std::string("example ") + run_engine::name_of(format)).c_str(),
          decode(format, run_engine::example_values(format, 64)));
  }
  const double nan = std::numeric_limits<double>::quiet_NaN();
  const std::vector<double> row{1, nan, 5, -2, 5};
  std::vector<double> indices;
  for (const run_engine::Ranked& each : run_engine::largest(row.data(), row.size(), 9)) {
    indices.push_back(static_cast<double>(each.index));
  }
  print("largest", indices);
  std::vector<double> times;
  for (int at = 200; at > 0; --at) {
    times.push_back(at);
  }
  const run_engine::Latency latency = run_engine::summarize(times);
  print("latency", {latency.mean, latency.median, latency.p99});
  const run_engine::Latency single = run_engine::summarize({3});
  std::printf("\"single\": [%g, %g, %g]}\n", single.mean, single.median, single.p99);
  return 0;
}
