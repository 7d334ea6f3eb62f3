// A part of an array, as std::span of C++20.
#pragma once

#include <cstddef>

namespace dynamo_moe {

template <typename T>
class Span {
 public:
  Span() = default;
  Span(const T* data, std::size_t size) : data_(data), size_(size) {}

  const T* begin() const { return data_; }
  const T* end() const { return data_ + size_; }
  std::size_t size() const { return size_; }
  const T& operator[](std::size_t index) const { return data_[index]; }
  Span Part(std::size_t first, std::size_t count) const { return {data_ + first, count}; }

 private:
  const T* data_ = nullptr;
  std::size_t size_ = 0;
};

}  // namespace dynamo_moe
