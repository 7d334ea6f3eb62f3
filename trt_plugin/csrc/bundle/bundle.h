// Reads bundles and programs, and checks everything in them before anything is used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "bundle/expression.h"
#include "bundle/format.h"
#include "span.h"
#include "status.h"

namespace dynamo_moe {

// A program whose offsets, indices and expressions have all been checked.
class Program {
 public:
  // A failure's message begins with the name. Copies the bytes, or, if they lie in an owner's
  // memory at a multiple of kTableAlignment, keeps the owner.
  static Status Parse(const void* data, std::size_t size, Program* program,
                      const std::string& name = "program",
                      std::shared_ptr<const std::string> owner = nullptr);

  const dynamo_moe_layer& layer() const { return header_.layer; }
  std::uint32_t architecture() const { return header_.architecture; }
  Span<format::Range> ranges() const { return ranges_; }
  Span<format::Kernel> kernels() const { return kernels_; }
  Span<format::TensorMap> tensor_maps() const { return tensor_maps_; }
  Span<format::Launch> launches() const { return launches_; }
  Span<format::Buffer> buffers() const { return buffers_; }
  Span<format::Expression> expressions() const { return expressions_; }

  // The state's parts, which persist from call to call; none of a fully resident layer.
  Span<format::Buffer> state() const { return state_; }

  // What a range launches before, in each of, and after its waves.
  Span<format::Launch> launches(const format::Range& range) const {
    return launches_.Part(range.first_launch, range.launches);
  }
  Span<format::Launch> wave(const format::Range& range) const {
    return launches_.Part(range.first_launch + range.launches, range.wave_launches);
  }
  Span<format::Launch> epilogue(const format::Range& range) const {
    return launches_.Part(range.first_launch + range.launches + range.wave_launches,
                          range.epilogue_launches);
  }
  Span<format::Buffer> buffers(const format::Range& range) const {
    return buffers_.Part(range.first_buffer, range.buffers);
  }
  Span<format::Argument> arguments(const format::Launch& launch) const {
    return arguments_.Part(launch.first_argument, launch.arguments);
  }
  Span<format::Instruction> instructions(const format::Expression& expression) const {
    return instructions_.Part(expression.first_instruction, expression.instructions);
  }
  std::string_view text(const format::String& string) const {
    return {strings_.begin() + string.offset, string.size};
  }
  const void* image(const format::Kernel& kernel) const {
    return images_.begin() + kernel.image_offset;
  }
  std::string_view bytes() const { return bytes_; }

  // Of wave 0.
  Sizes SizesFor(std::int64_t tokens) const;

  // The range of a number of tokens, at least 1; null if there is none.
  const format::Range* RangeOf(std::int64_t tokens) const;

  Status Evaluate(std::uint32_t expression, const Sizes& sizes, std::int64_t* value) const;

 private:
  friend class ProgramChecker;

  std::shared_ptr<const std::string> owner_;
  std::string_view bytes_;
  format::ProgramHeader header_ = {};
  Span<format::Range> ranges_;
  Span<format::Buffer> state_;
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

// Whether a program for one architecture runs on a device of another. Code for sm_90 and later uses
// features of that one architecture. Code for sm_8x runs on later sm_8x, except that sm_87 (Orin, a
// Tegra) runs only its own code, which runs nowhere else.
bool RunsOn(std::uint32_t program, std::uint32_t device);

bool SameLayer(const dynamo_moe_layer& a, const dynamo_moe_layer& b);

// Whether bytes are meant to be a bundle, not a program.
bool IsBundle(std::string_view bytes);

// A new bundle of programs, which are not empty: equal programs give equal bytes.
std::string BundleOf(const std::vector<std::string_view>& programs);

// A bundle in its caller's memory, all of which has been checked.
class Bundle {
 public:
  struct Entry {
    dynamo_moe_layer layer;
    std::uint32_t architecture;
    std::size_t offset;
    std::string_view bytes;
  };

  static Status Open(const void* data, std::size_t size, Bundle* bundle);

  const std::vector<Entry>& programs() const { return programs_; }

  // The bytes of the layer's program for an architecture, or else for the nearest lower one whose
  // code runs there.
  Status Find(const dynamo_moe_layer& layer, std::uint32_t architecture,
              std::string_view* program) const;

 private:
  std::vector<Entry> programs_;
};

}  // namespace dynamo_moe
