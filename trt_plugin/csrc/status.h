// A status code with its message. Nothing here throws on purpose; the C interface catches exhausted
// memory.
#pragma once

#include <charconv>
#include <cstdint>
#include <cstdio>
#include <iterator>
#include <string>
#include <type_traits>
#include <utility>

#include "dynamo_moe.h"

namespace dynamo_moe {

class [[nodiscard]] Status {
 public:
  Status() = default;
  Status(dynamo_moe_status code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == DYNAMO_MOE_OK; }
  dynamo_moe_status code() const { return code_; }
  const std::string& message() const { return message_; }

 private:
  dynamo_moe_status code_ = DYNAMO_MOE_OK;
  std::string message_;
};

// Joins the parts of a message. Numbers do not depend on the host program's locale.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    using Part = std::decay_t<decltype(part)>;
    if constexpr (std::is_enum_v<Part>) {
      text += std::to_string(static_cast<std::underlying_type_t<Part>>(part));
    } else if constexpr (std::is_floating_point_v<Part>) {
      char shortest[32];
      text.append(
          shortest,
          std::to_chars(shortest, std::end(shortest), part, std::chars_format::general, 6).ptr);
    } else if constexpr (std::is_arithmetic_v<Part>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
  return text;
}

// A number in 8 hexadecimal digits.
inline std::string Hexadecimal(std::uint32_t value) {
  char text[9];
  std::snprintf(text, sizeof(text), "%08x", value);
  return text;
}

template <typename... Parts>
Status InvalidArgument(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_ARGUMENT, Text(parts...)};
}

}  // namespace dynamo_moe

#define DYNAMO_MOE_RETURN_IF_ERROR(expression)                        \
  do {                                                                \
    if (::dynamo_moe::Status status_ = (expression); !status_.ok()) { \
      return status_;                                                 \
    }                                                                 \
  } while (false)
