// Writes text with an engine of a language model, the most likely token each time.
#pragma once

#include "options.h"

namespace run_engine {

// Prints the tokens that follow each of the options' prompts, a line each, then the latency.
void generate(const Options& options);

}  // namespace run_engine
