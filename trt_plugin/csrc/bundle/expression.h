// Integer expressions over a layer's sizes, in postfix order.
#pragma once

#include <cstdint>
#include <string>

#include "bundle/format.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

// The values of the symbols, by format::Symbol.
struct Sizes {
  std::int64_t values[format::kSymbols];
};

// Checks that the number of instructions is permitted, and that they leave one value on a stack
// which never overflows.
Status CheckExpression(Span<format::Instruction> instructions);

// The value of checked instructions. False where it overflows 64 bits, or a divisor is below 1.
bool Evaluate(Span<format::Instruction> instructions, const Sizes& sizes, std::int64_t* value);

// Checked instructions in words, such as "cdiv(T * K, 16)".
std::string ExpressionText(Span<format::Instruction> instructions);

}  // namespace dynamo_moe
