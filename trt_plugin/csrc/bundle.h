// Reads bundles and programs, and checks everything in them before anything is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "expression.h"
#include "format.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

// A program whose every offset, index and expression is known to be right.
class Program {
 public:
  // Copies the bytes.
  static Status Parse(const void* data, std::size_t size, Program* program);

  const dynamo_moe_layer& layer() const { return header_.layer; }
  std::uint32_t architecture() const { return header_.architecture; }
  Span<format::Range> ranges() const { return ranges_; }
  Span<format::Kernel> kernels() const { return kernels_; }
  Span<format::TensorMap> tensor_maps() const { return tensor_maps_; }

  Span<format::Launch> launches(const format::Range& range) const {
    return launches_.Part(range.first_launch, range.launches);
  }
  Span<format::Buffer> buffers(const format::Range& range) const {
    return buffers_.Part(range.first_buffer, range.buffers);
  }
  Span<format::Argument> arguments(const format::Launch& launch) const {
    return arguments_.Part(launch.first_argument, launch.arguments);
  }
  std::string_view text(const format::String& string) const {
    return {strings_.begin() + string.offset, string.size};
  }
  const void* image(const format::Kernel& kernel) const {
    return images_.begin() + kernel.image_offset;
  }
  std::string_view bytes() const { return {bytes_.data(), bytes_.size()}; }

  Sizes SizesFor(std::int64_t tokens) const;

  // The range of a number of tokens, at least 1; null where there is none.
  const format::Range* RangeOf(std::int64_t tokens) const;

  Status Evaluate(std::uint32_t expression, const Sizes& sizes, std::int64_t* value) const;

 private:
  friend class ProgramChecker;

  std::vector<char> bytes_;
  format::ProgramHeader header_ = {};
  Span<format::Range> ranges_;
  Span<format::Buffer> buffers_;
  Span<format::Launch> launches_;
  Span<format::Argument> arguments_;
  Span<format::TensorMap> tensor_maps_;
  Span<format::Kernel> kernels_;
  Span<format::Expression> expressions_;
  Span<format::Instruction> instructions_;
  Span<char> strings_;
  Span<char> images_;
};

// Where each program lies in a bundle. Checks the bundle, not what is in the programs.
Status ReadDirectory(const void* data, std::size_t size,
                     std::vector<format::DirectoryEntry>* programs);

}  // namespace dynamo_moe
