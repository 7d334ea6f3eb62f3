#include "bundle/expression.h"

#include <algorithm>
#include <cstddef>
#include <utility>
#include <vector>

#include "bundle/checks.h"
#include "bundle/layer.h"

namespace dynamo_moe {
namespace {

Status CheckInstruction(const format::Instruction& instruction) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow("opcode", instruction.opcode, format::kOpcodes));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("reserved", instruction.reserved));
  if (instruction.opcode == format::kConstant) {
    return {};
  }
  // Negative values become large ones.
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

// An operation in words; sums and quotients are in parentheses.
std::string Join(std::uint32_t opcode, const std::string& a, const std::string& b) {
  switch (opcode) {
    case format::kAdd:
      return Text("(", a, " + ", b, ")");
    case format::kSubtract:
      return Text("(", a, " - ", b, ")");
    case format::kMultiply:
      return Text(a, " * ", b);
    case format::kDivideDown:
      return Text("(", a, " // ", b, ")");
    default:
      return Text(format::kOpcodeNames[opcode], "(", a, ", ", b, ")");
  }
}

}  // namespace

Status CheckExpression(Span<format::Instruction> instructions) {
  DYNAMO_MOE_RETURN_IF_ERROR(
      CheckIn("the number of instructions", instructions.size(), 1, format::kMaxInstructions));
  std::size_t depth = 0;
  for (std::size_t i = 0; i < instructions.size(); ++i) {
    const std::uint32_t opcode = instructions[i].opcode;
    if (const Status status = CheckInstruction(instructions[i]); !status.ok()) {
      return InvalidBundle("instruction ", i, ": ", status.message());
    }
    if (opcode <= format::kSymbol) {
      ++depth;
    } else if (depth < 2) {
      return InvalidBundle("instruction ", i, ": ", format::kOpcodeNames[opcode],
                           " needs 2 values, there are ", depth);
    } else {
      --depth;
    }
    if (depth > format::kStackSize) {
      return InvalidBundle("instruction ", i, ": the stack must not pass ", format::kStackSize,
                           " values");
    }
  }
  return depth == 1 ? Status() : InvalidBundle("must leave 1 value, got ", depth);
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

std::string ExpressionText(Span<format::Instruction> instructions) {
  std::vector<std::string> stack;
  for (const format::Instruction& each : instructions) {
    if (each.opcode <= format::kSymbol) {
      stack.push_back(each.opcode == format::kConstant ? Text(each.value)
                                                       : format::kSymbolNames[each.value]);
      continue;
    }
    const std::string b = std::move(stack.back());
    stack.pop_back();
    stack.back() = Join(each.opcode, stack.back(), b);
  }
  return stack.front();
}

}  // namespace dynamo_moe
