// Names bytes by their content. An engine stores such names: changing the hash breaks engines.
#pragma once

#include <cstdint>
#include <cstring>
#include <string_view>

namespace dynamo_moe {

struct ContentKey {
  std::uint64_t size = 0;
  std::uint64_t hash = 0;

  explicit ContentKey() = default;
  explicit ContentKey(std::string_view bytes) : size(bytes.size()), hash(0xCBF29CE484222325U) {
    // As FNV-1a, but on words, with a shift that carries their high bits to the low ones.
    for (std::size_t at = 0; at < bytes.size(); at += sizeof(std::uint64_t)) {
      std::uint64_t word = 0;
      const std::string_view part = bytes.substr(at, sizeof(word));
      std::memcpy(&word, part.data(), part.size());
      hash = (hash ^ word) * 0x100000001B3U;
      hash ^= hash >> 32;
    }
  }

  bool operator==(const ContentKey& other) const {
    return size == other.size && hash == other.hash;
  }
};

}  // namespace dynamo_moe
