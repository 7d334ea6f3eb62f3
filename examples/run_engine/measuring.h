// Runs an engine on inputs of one shape, and measures it.
#pragma once

#include "options.h"

namespace run_engine {

// Prints the tensors, the latency and what the options ask for of the outputs.
void measure(const Options& options);

}  // namespace run_engine
