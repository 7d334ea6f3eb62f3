// Runs an engine on a GPU without Python: see README.md beside this file.

#include <cstdio>
#include <exception>
#include <iostream>
#include <string>
#include <vector>

#include "cuda.h"
#include "generation.h"
#include "measuring.h"
#include "options.h"
#include "ranks.h"

namespace {

// Gives this process its rank's engine and GPU. Rank 0 speaks for all of them.
void take_place(run_engine::Options& options) {
  const run_engine::Place place = run_engine::place_of_process();
  options.place = place;
  run_engine::select_device(place.local < 0 ? place.rank : place.local);
  options.engine = run_engine::rank_path(options.engine, place.rank);
  if (place.rank > 0) {
    options.output_files.clear();
    std::cout.setstate(std::ios::failbit);
  }
}

void report(const std::string& rank, const std::exception& error) {
  std::fprintf(stderr, "error: %s%s\n", rank.c_str(), error.what());
}

}  // namespace

int main(int count, char** values) {
  std::string rank;
  try {
    run_engine::Options options =
        run_engine::parse_options(std::vector<std::string>(values + 1, values + count));
    if (options.help) {
      std::cout << run_engine::usage();
      return 0;
    }
    if (!options.nccl_id.empty()) {
      take_place(options);
      rank = "rank " + std::to_string(options.place->rank) + ": ";
    }
    if (options.prompts.empty()) {
      run_engine::measure(options);
    } else {
      run_engine::generate(options);
    }
    return 0;
  } catch (const run_engine::UsageError& error) {
    report(rank, error);
    return 2;
  } catch (const std::exception& error) {
    report(rank, error);
    return 1;
  }
}
