#include "expression.h"

#include <algorithm>
#include <cstddef>

#include "rules.h"

namespace dynamo_moe {
namespace {

// From format::kAdd on.
constexpr const char* kOperations[] = {"add",       "subtract", "multiply", "divide down",
                                       "divide up", "minimum",  "maximum"};

Status CheckInstruction(const format::Instruction& instruction) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow("opcode", instruction.opcode, format::kOpcodes));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("reserved", instruction.reserved));
  if (instruction.opcode == format::kConstant) {
    return {};
  }
  // A negative one is large here.
  const auto value = static_cast<std::uint64_t>(instruction.value);
  return instruction.opcode == format::kSymbol ? CheckBelow("symbol", value, format::kSymbols)
                                               : CheckZero("an operation's value", value);
}

// a op b; false where it overflows or divides by less than 1.
bool Apply(std::uint32_t opcode, std::int64_t a, std::int64_t b, std::int64_t* result) {
  switch (opcode) {
    case format::kAdd:
      return !__builtin_add_overflow(a, b, result);
    case format::kSubtract:
      return !__builtin_sub_overflow(a, b, result);
    case format::kMultiply:
      return !__builtin_mul_overflow(a, b, result);
    case format::kMinimum:
      *result = std::min(a, b);
      return true;
    case format::kMaximum:
      *result = std::max(a, b);
      return true;
    default:
      break;
  }
  if (b < 1) {
    return false;
  }
  // C++ rounds towards 0.
  const std::int64_t quotient = a / b;
  const std::int64_t remainder = a % b;
  const bool down = opcode == format::kDivideDown;
  *result = quotient + (down ? -static_cast<std::int64_t>(remainder < 0)
                             : static_cast<std::int64_t>(remainder > 0));
  return true;
}

}  // namespace

Status CheckExpression(Span<format::Instruction> instructions) {
  std::size_t depth = 0;
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    const std::uint32_t opcode = instructions[i].opcode;
    if (const Status status = CheckInstruction(instructions[i]); !status.ok()) {
      return InvalidBundle("instruction ", i, ": ", status.message());
    }
    if (opcode <= format::kSymbol) {
      ++depth;
    } else if (depth < 2) {
      return InvalidBundle("instruction ", i, ": ", kOperations[opcode - format::kAdd],
                           " needs 2 values, there are ", depth);
    } else {
      --depth;
    }
    if (depth > format::kStackSize) {
      return InvalidBundle("instruction ", i, ": the stack must not pass ", format::kStackSize,
                           " values");
    }
  }
  return depth == 1 ? Status() : InvalidBundle("must leave 1 value, leaves ", depth);
}

bool Evaluate(Span<format::Instruction> instructions, const Sizes& sizes, std::int64_t* value) {
  std::int64_t stack[format::kStackSize] = {};
  std::size_t depth = 0;
  for (const format::Instruction& each : instructions) {
    if (each.opcode == format::kConstant) {
      stack[depth++] = each.value;
    } else if (each.opcode == format::kSymbol) {
      stack[depth++] = sizes.values[each.value];
    } else {
      --depth;
      if (!Apply(each.opcode, stack[depth - 1], stack[depth], &stack[depth - 1])) {
        return false;
      }
    }
  }
  *value = stack[0];
  return true;
}

}  // namespace dynamo_moe
