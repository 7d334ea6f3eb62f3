// A status code with its message. Nothing here throws on purpose; running out of memory is caught
// where the C interface ends.
#pragma once

#include <string>
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

// Joins what a message is made of; numbers are written in decimal.
template <typename... Parts>
std::string Text(const Parts&... parts) {
  std::string text;
  const auto append = [&text](const auto& part) {
    if constexpr (std::is_arithmetic_v<std::decay_t<decltype(part)>>) {
      text += std::to_string(part);
    } else {
      text += part;
    }
  };
  (append(parts), ...);
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
