// Errors reach the user through TensorRT's logger.
#pragma once

#include <exception>
#include <new>

#include "plugin/tensorrt_abi.h"
#include "status.h"

namespace dynamo_moe::plugin {

// Keeps what setLoggerFinder() was given; null is permitted.
void SetLoggerFinder(void* finder) noexcept;

// Logs "subject: message" to the logger of the engine or builder that is calling, or else to the
// one that TensorRT was last given, or else to stderr.
void Log(tensorrt::Severity severity, const char* subject, const char* message) noexcept;

// Calls a function that returns a Status, and logs a failure. Returns 0 or the status's code, as
// TensorRT expects.
template <typename Function>
int Guard(const char* subject, const Function& function) noexcept {
  try {
    const Status status = function();
    if (!status.ok()) {
      Log(tensorrt::Severity::kError, subject, status.message().c_str());
    }
    return status.code();
  } catch (const std::bad_alloc&) {
    Log(tensorrt::Severity::kError, subject, "the host's memory is exhausted");
    return DYNAMO_MOE_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    Log(tensorrt::Severity::kError, subject, error.what());
    return DYNAMO_MOE_INVALID_ARGUMENT;
  }
}

}  // namespace dynamo_moe::plugin
