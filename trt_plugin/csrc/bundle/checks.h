// Checks of a bundle's fields and single records. Each failure names the value and the rule.
#pragma once

#include <cstddef>
#include <cstdint>

#include "bundle/format.h"
#include "status.h"

namespace dynamo_moe {

template <typename... Parts>
Status InvalidBundle(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_BUNDLE, Text(parts...)};
}

inline Status CheckZero(const char* field, std::uint64_t value) {
  return value == 0 ? Status() : InvalidBundle(field, " must be 0, got ", value);
}

inline Status CheckIn(const char* field, std::uint64_t value, std::uint64_t least,
                      std::uint64_t most) {
  return least <= value && value <= most
             ? Status()
             : InvalidBundle(field, " must be in ", least, "..", most, ", got ", value);
}

// An index into a table.
inline Status CheckBelow(const char* field, std::uint64_t value, std::uint64_t limit) {
  return value < limit ? Status() : InvalidBundle(field, " must be below ", limit, ", got ", value);
}

inline Status CheckMultiple(const char* field, std::uint64_t value, std::uint64_t step) {
  return value % step == 0 ? Status()
                           : InvalidBundle(field, " must be a multiple of ", step, ", got ", value);
}

// A part of a table.
inline Status CheckWithin(const char* field, std::uint64_t first, std::uint64_t count,
                          std::uint64_t size) {
  return first <= size && count <= size - first
             ? Status()
             : InvalidBundle(field, " must lie in 0..", size, ", got ", count, " from ", first);
}

// Checks that an image is a 64-bit ELF file for CUDA whose tables and sections lie within it: the
// driver reads an image without knowing its size.
Status CheckImage(const void* image, std::size_t size);

// Checks that cuTensorMapEncodeTiled takes a record, in a program whose state has so many parts.
Status CheckTensorMap(const format::TensorMap& record, std::size_t state);

}  // namespace dynamo_moe
