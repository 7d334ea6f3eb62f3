// The command line of run_engine.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "ranks.h"

namespace run_engine {

// Something that the user can correct; the message says what.
class UsageError : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

struct Options {
  std::string engine;
  // The plugin's library, loaded before the engine; empty: none.
  std::string plugin;
  // The file by which the ranks of an engine of several find each other; empty: one GPU alone.
  std::string nccl_id;
  // This process among them, which its environment says.
  std::optional<Place> place;
  // How many seconds ranks wait for each other.
  int nccl_wait = 60;
  std::map<std::string, std::vector<std::int64_t>> shapes;
  // Size of the first dimension of every input without a shape, where it is symbolic.
  std::optional<std::int64_t> batch;
  std::map<std::string, std::string> input_files;
  std::map<std::string, std::string> output_files;
  std::int32_t profile = 0;
  int warmup = 10;
  int iterations = 100;
  bool cuda_graph = false;
  // How many of an output's largest values to print, for each row; 0: none.
  int top_k = 0;
  // Token ids of prompts, which a language model goes on with; empty: the engine is measured.
  std::vector<std::vector<std::int64_t>> prompts;
  // How many tokens are written at most, and those that end a row.
  int steps = 32;
  std::vector<std::int64_t> ends;
  bool help = false;
};

// Throws a UsageError.
Options parse_options(const std::vector<std::string>& arguments);

const char* usage();

}  // namespace run_engine
