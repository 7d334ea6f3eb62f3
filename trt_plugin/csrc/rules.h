// Rules that many fields of a bundle have; each says what is wrong with the value and the rule.
#pragma once

#include <cstdint>

#include "status.h"

namespace dynamo_moe {

template <typename... Parts>
Status InvalidBundle(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_BUNDLE, Text(parts...)};
}

inline Status CheckZero(const char* field, std::uint64_t value) {
  return value == 0 ? Status() : InvalidBundle(field, " must be 0, is ", value);
}

inline Status CheckIn(const char* field, std::uint64_t value, std::uint64_t least,
                      std::uint64_t most) {
  return least <= value && value <= most
             ? Status()
             : InvalidBundle(field, " must be in ", least, "..", most, ", is ", value);
}

// An index into a table.
inline Status CheckBelow(const char* field, std::uint64_t value, std::uint64_t limit) {
  return value < limit ? Status() : InvalidBundle(field, " must be below ", limit, ", is ", value);
}

inline Status CheckMultiple(const char* field, std::uint64_t value, std::uint64_t step) {
  return value % step == 0 ? Status()
                           : InvalidBundle(field, " must be a multiple of ", step, ", is ", value);
}

// A part of a table.
inline Status CheckWithin(const char* field, std::uint64_t first, std::uint64_t count,
                          std::uint64_t size) {
  return first <= size && count <= size - first
             ? Status()
             : InvalidBundle(field, " are ", count, " from ", first, " on, there are ", size);
}

}  // namespace dynamo_moe
