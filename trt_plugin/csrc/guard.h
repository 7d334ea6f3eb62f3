// How a function of the C interface ends: with a status, and the message behind it.
#pragma once

#include <exception>
#include <new>

#include "dynamo_moe.h"
#include "status.h"

namespace dynamo_moe {

// Keeps a message for this thread's dynamo_moe_last_error(), and returns the status.
dynamo_moe_status Keep(dynamo_moe_status status, const char* message);

// Runs a function that returns a Status; nothing that it throws leaves it.
template <typename Function>
dynamo_moe_status Guard(const Function& function) noexcept {
  try {
    const Status status = function();
    return status.ok() ? DYNAMO_MOE_OK : Keep(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return Keep(DYNAMO_MOE_OUT_OF_MEMORY, "the host's memory is exhausted");
  } catch (const std::exception& error) {
    return Keep(DYNAMO_MOE_INVALID_ARGUMENT, error.what());
  } catch (...) {
    return Keep(DYNAMO_MOE_INVALID_ARGUMENT, "unknown error");
  }
}

inline Status NotNull(const void* pointer, const char* name) {
  return pointer != nullptr ? Status() : InvalidArgument(name, " must not be null");
}

}  // namespace dynamo_moe
