// CRC-32 as in zlib and PNG.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace dynamo_moe {

namespace internal {

constexpr std::array<std::uint32_t, 256> MakeCrcTable() {
  std::array<std::uint32_t, 256> table{};
  for (std::uint32_t byte = 0; byte < 256; ++byte) {
    std::uint32_t value = byte;
    for (int bit = 0; bit < 8; ++bit) {
      value = (value >> 1) ^ ((value & 1) != 0 ? 0xEDB88320U : 0);
    }
    table[byte] = value;
  }
  return table;
}

inline constexpr std::array<std::uint32_t, 256> kCrcTable = MakeCrcTable();

}  // namespace internal

// The checksum of bytes of which the four at `hole` count as 0.
inline std::uint32_t ChecksumWithHole(const unsigned char* bytes, std::size_t size,
                                      std::size_t hole) {
  std::uint32_t value = 0xFFFFFFFFU;
  for (std::size_t i = 0; i < size; ++i) {
    const std::uint32_t byte = i - hole < 4 ? 0 : bytes[i];
    value = (value >> 8) ^ internal::kCrcTable[(value ^ byte) & 0xFF];
  }
  return ~value;
}

}  // namespace dynamo_moe
