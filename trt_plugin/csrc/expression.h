// Integer expressions over a layer's sizes, in postfix order.
#pragma once

#include <cstdint>

#include "format.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

// The values of the symbols, by format::Symbol.
struct Sizes {
  std::int64_t values[format::kSymbols];
};

// Whether instructions leave one value on the stack, which they never overflow.
Status CheckExpression(Span<format::Instruction> instructions);

// The value of instructions that have been checked. False where it overflows 64 bits, or a divisor
// is below 1.
bool Evaluate(Span<format::Instruction> instructions, const Sizes& sizes, std::int64_t* value);

}  // namespace dynamo_moe
