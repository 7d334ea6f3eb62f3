// Where buffers lie that follow one another in memory: a workspace's, or a state's.
#pragma once

#include <cstddef>
#include <limits>

#include "bundle/bundle.h"
#include "status.h"

namespace dynamo_moe {

// Sets each buffer's offset, a multiple of kWorkspaceAlignment, and the end of the last; `whole`
// says what they are the parts of.
inline Status BufferOffsets(const Program& program, Span<format::Buffer> buffers,
                            const Sizes& sizes, const char* whole, std::size_t* offsets,
                            std::size_t* end) {
  std::size_t index = 0;
  *end = 0;
  for (const format::Buffer& buffer : buffers) {
    std::int64_t size = 0;
    DYNAMO_MOE_RETURN_IF_ERROR(program.Evaluate(buffer.size, sizes, &size));
    constexpr std::int64_t kLimit = std::numeric_limits<std::int64_t>::max() / 4;
    if (size < 0 || size > kLimit || *end > static_cast<std::size_t>(kLimit)) {
      return InvalidArgument("the ", whole, "'s part ", program.text(buffer.name), " would have ",
                             size, " bytes for ", sizes.values[format::kTokens], " tokens");
    }
    offsets[index++] = *end;
    const std::uint64_t alignment = format::kWorkspaceAlignment;
    *end += (static_cast<std::size_t>(size) + alignment - 1) / alignment * alignment;
  }
  return {};
}

}  // namespace dynamo_moe
