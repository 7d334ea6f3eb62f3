// Runs an engine on a GPU without Python: see README.md beside this file.

#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "generation.h"
#include "measuring.h"
#include "options.h"

int main(int count, char** values) {
  try {
    const run_engine::Options options =
        run_engine::parse_options(std::vector<std::string>(values + 1, values + count));
    if (options.help) {
      std::cout << run_engine::usage();
    } else if (options.prompts.empty()) {
      run_engine::measure(options);
    } else {
      run_engine::generate(options);
    }
    return 0;
  } catch (const run_engine::UsageError& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
