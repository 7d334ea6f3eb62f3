#include "bundle.h"

#include <algorithm>
#include <cstring>
#include <limits>

#include "checksum.h"
#include "layer.h"

namespace dynamo_moe {
namespace {

template <typename... Parts>
Status InvalidBundle(const Parts&... parts) {
  return {DYNAMO_MOE_INVALID_BUNDLE, Text(parts...)};
}

// What files and programs have in common: `kind` names which of the two it is.
template <typename Header>
Status ReadHeader(const char* kind, const unsigned char (&magic)[format::kMagicSize],
                  const void* data, std::size_t size, Header* header) {
  if (data == nullptr) {
    return InvalidArgument(kind, ": the data is a null pointer");
  }
  if (size < sizeof(Header)) {
    return InvalidBundle(kind, ": truncated: the header has ", sizeof(Header), " bytes, ", size,
                         " are given");
  }
  std::memcpy(header, data, sizeof(Header));
  if (std::memcmp(header->magic, magic, sizeof(magic)) != 0) {
    return InvalidBundle(kind, ": not a kernel ", kind, ", its first bytes are others");
  }
  if (header->version != format::kVersion) {
    return InvalidBundle(kind, ": has version ", header->version, ", this library reads version ",
                         format::kVersion);
  }
  if (header->size != size) {
    return InvalidBundle(kind, ": ", size < header->size ? "truncated" : "too long",
                         ": the header says ", header->size, " bytes, ", size, " are given");
  }
  const std::uint32_t checksum =
      ChecksumWithHole(static_cast<const unsigned char*>(data), size, format::kChecksumOffset);
  if (header->checksum != checksum) {
    return InvalidBundle(kind, ": damaged: the checksum is ", checksum, ", the header says ",
                         header->checksum);
  }
  if (header->reserved != 0) {
    return InvalidBundle(kind, ": reserved must be 0, is ", header->reserved);
  }
  return {};
}

bool AllZero(const char* begin, const char* end) {
  return std::all_of(begin, end, [](char byte) { return byte == 0; });
}

// Whether bytes are UTF-8 (RFC 3629) without control characters.
bool IsText(std::string_view text) {
  std::size_t at = 0;
  while (at < text.size()) {
    const auto lead = static_cast<unsigned char>(text[at]);
    std::size_t length = 1;
    std::uint32_t code = lead;
    std::uint32_t least = 0;
    if (lead >= 0xF0 && lead < 0xF8) {
      length = 4, code = lead & 0x07, least = 0x10000;
    } else if (lead >= 0xE0) {
      length = 3, code = lead & 0x0F, least = 0x800;
    } else if (lead >= 0xC0) {
      length = 2, code = lead & 0x1F, least = 0x80;
    }
    if ((lead >= 0x80 && lead < 0xC0) || lead >= 0xF8 || text.size() - at < length) {
      return false;
    }
    for (std::size_t i = 1; i < length; ++i) {
      const auto next = static_cast<unsigned char>(text[at + i]);
      if ((next & 0xC0) != 0x80) {
        return false;
      }
      code = (code << 6) | (next & 0x3F);
    }
    const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) || control) {
      return false;
    }
    at += length;
  }
  return true;
}

// a op b; false where it overflows or divides by less than 1.
bool Apply(std::uint32_t opcode, std::int64_t a, std::int64_t b, std::int64_t* result) {
  switch (opcode) {
    case format::kAdd:
      return !__builtin_add_overflow(a, b, result);
    case format::kSubtract:
      return !__builtin_sub_overflow(a, b, result);
    case format::kMultiply:
      return !__builtin_mul_overflow(a, b, result);
    case format::kMinimum:
      *result = std::min(a, b);
      return true;
    case format::kMaximum:
      *result = std::max(a, b);
      return true;
    default:
      break;
  }
  if (b < 1) {
    return false;
  }
  // C++ rounds towards 0.
  const std::int64_t quotient = a / b;
  const std::int64_t remainder = a % b;
  const bool down = opcode == format::kDivideDown;
  *result = quotient + (down ? -static_cast<std::int64_t>(remainder < 0)
                             : static_cast<std::int64_t>(remainder > 0));
  return true;
}

}  // namespace

// Checks the tables of a program one after another.
class ProgramChecker {
 public:
  explicit ProgramChecker(Program* program) : program_(*program) {}

  Status Run() {
    DYNAMO_MOE_RETURN_IF_ERROR(FindTables());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckLayer(program_.header_.layer));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckExpressions());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckKernels());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckTensorMaps());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckBuffers());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckLaunches());
    return CheckRanges();
  }

 private:
  template <typename... Parts>
  static Status Wrong(const Parts&... parts) {
    return InvalidBundle("program: ", parts...);
  }

  template <typename T>
  Status FindTable(std::size_t index, const char* name, std::size_t* end, Span<T>* table) {
    const format::Table& entry = program_.header_.tables[index];
    const std::size_t size = program_.bytes_.size();
    if (entry.offset % format::kTableAlignment != 0 || entry.offset < *end || entry.offset > size) {
      return Wrong("table ", name, " must begin at a multiple of ", format::kTableAlignment, " in ",
                   *end, "..", size, ", begins at ", entry.offset);
    }
    if (entry.count > (size - entry.offset) / sizeof(T)) {
      return Wrong("table ", name, " has ", entry.count, " records of ", sizeof(T),
                   " bytes from byte ", entry.offset, " on, but the program has ", size, " bytes");
    }
    const char* const bytes = program_.bytes_.data();
    if (!AllZero(bytes + *end, bytes + entry.offset)) {
      return Wrong("the bytes before table ", name, " must be 0");
    }
    *table = {reinterpret_cast<const T*>(bytes + entry.offset), entry.count};
    *end = entry.offset + entry.count * sizeof(T);
    return {};
  }

  Status FindTables() {
    std::size_t end = sizeof(format::ProgramHeader);
    Program& p = program_;
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kRanges, "ranges", &end, &p.ranges_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kBuffers, "buffers", &end, &p.buffers_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kLaunches, "launches", &end, &p.launches_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kArguments, "arguments", &end, &p.arguments_));
    DYNAMO_MOE_RETURN_IF_ERROR(
        FindTable(format::kTensorMaps, "tensor maps", &end, &p.tensor_maps_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kKernels, "kernels", &end, &p.kernels_));
    DYNAMO_MOE_RETURN_IF_ERROR(
        FindTable(format::kExpressions, "expressions", &end, &p.expressions_));
    DYNAMO_MOE_RETURN_IF_ERROR(
        FindTable(format::kInstructions, "instructions", &end, &p.instructions_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kStrings, "strings", &end, &p.strings_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kImages, "images", &end, &p.images_));
    if (end != p.bytes_.size()) {
      return Wrong("the tables end at byte ", end, ", the program at ", p.bytes_.size());
    }
    return {};
  }

  Status CheckExpressions() const {
    for (std::size_t i = 0; i < program_.expressions_.size(); ++i) {
      const format::Expression& expression = program_.expressions_[i];
      if (expression.instructions == 0 ||
          !Within(expression.first_instruction, expression.instructions,
                  program_.instructions_.size())) {
        return Wrong("expression ", i, " has instructions ", expression.first_instruction, " + ",
                     expression.instructions, " of ", program_.instructions_.size());
      }
      DYNAMO_MOE_RETURN_IF_ERROR(CheckStack(i));
    }
    return {};
  }

  Status CheckStack(std::size_t index) const {
    const format::Expression& expression = program_.expressions_[index];
    std::size_t depth = 0;
    for (const format::Instruction& each :
         program_.instructions_.Part(expression.first_instruction, expression.instructions)) {
      if (each.opcode >= format::kOpcodes || each.reserved != 0) {
        return Wrong("expression ", index, " has the unknown opcode ", each.opcode);
      }
      if (each.opcode == format::kSymbol && (each.value < 0 || each.value >= format::kSymbols)) {
        return Wrong("expression ", index, " has the unknown symbol ", each.value);
      }
      if (each.opcode > format::kSymbol && each.value != 0) {
        return Wrong("expression ", index, " gives the value ", each.value, " to an operation");
      }
      if (each.opcode <= format::kSymbol) {
        ++depth;
      } else if (depth < 2) {
        return Wrong("expression ", index, " lacks operands");
      } else {
        --depth;
      }
      if (depth > format::kStackSize) {
        return Wrong("expression ", index, " needs more than ", format::kStackSize, " operands");
      }
    }
    if (depth != 1) {
      return Wrong("expression ", index, " leaves ", depth, " values, not 1");
    }
    return {};
  }

  Status CheckKernels() const {
    for (std::size_t i = 0; i < program_.kernels_.size(); ++i) {
      const format::Kernel& kernel = program_.kernels_[i];
      DYNAMO_MOE_RETURN_IF_ERROR(CheckText(kernel.name, "kernel", i));
      DYNAMO_MOE_RETURN_IF_ERROR(CheckText(kernel.description, "kernel", i));
      const std::size_t place = program_.header_.tables[format::kImages].offset;
      if (kernel.name.size == 0) {
        return Wrong("kernel ", i, " has no name");
      }
      if (kernel.image_size == 0 || kernel.image_offset > program_.images_.size() ||
          kernel.image_size > program_.images_.size() - kernel.image_offset ||
          (place + kernel.image_offset) % format::kImageAlignment != 0) {
        return Wrong("kernel ", i, " has the image ", kernel.image_offset, " + ", kernel.image_size,
                     " of ", program_.images_.size(), " bytes; images begin at multiples of ",
                     format::kImageAlignment);
      }
      if (kernel.warps < 1 || kernel.warps > 32 || kernel.flags > format::kDependentLaunch ||
          kernel.reserved != 0 || kernel.shared_memory > (1U << 20)) {
        return Wrong("kernel ", i, " has ", kernel.warps, " warps, ", kernel.shared_memory,
                     " bytes of shared memory, flags ", kernel.flags, ", reserved ",
                     kernel.reserved);
      }
    }
    return {};
  }

  Status CheckText(const format::String& string, const char* what, std::size_t index) const {
    if (!Within(string.offset, string.size, program_.strings_.size())) {
      return Wrong(what, " ", index, " has the string ", string.offset, " + ", string.size, " of ",
                   program_.strings_.size(), " bytes");
    }
    if (!IsText(program_.text(string))) {
      return Wrong(what, " ", index, " has a string that is not UTF-8 without control characters");
    }
    return {};
  }

  Status CheckTensorMaps() const {
    for (std::size_t i = 0; i < program_.tensor_maps_.size(); ++i) {
      const format::TensorMap& map = program_.tensor_maps_[i];
      if (!IsTensorMap(map)) {
        return Wrong("tensor map ", i, " is one that no driver encodes: tensor ", map.tensor,
                     ", type ", map.type, ", rank ", map.rank, ", swizzle ", map.swizzle,
                     ", box of ", map.box[0], " elements along the innermost dimension");
      }
    }
    return {};
  }

  // What cuTensorMapEncodeTiled takes.
  static bool IsTensorMap(const format::TensorMap& map) {
    const std::uint64_t element = ElementSize(map.type);
    bool right = map.tensor < format::kTensors && element != 0 && map.rank >= 2 &&
                 map.rank <= format::kMaxRank && map.swizzle <= format::kMaxSwizzle &&
                 map.strides[0] == element && map.box[0] * element % format::kBoxAlignment == 0;
    for (const std::uint32_t reserved : map.reserved) {
      right = right && reserved == 0;
    }
    for (std::uint32_t axis = 0; right && axis < format::kMaxRank; ++axis) {
      const std::uint64_t size = map.sizes[axis];
      const std::uint64_t stride = map.strides[axis];
      if (axis >= map.rank) {
        right = size == 0 && stride == 0 && map.box[axis] == 0;
        continue;
      }
      const bool steps = axis == 0 || (stride != 0 && stride % format::kBoxAlignment == 0 &&
                                       stride < format::kMaxStride);
      right = steps && size >= 1 && size <= format::kMaxSize && map.box[axis] >= 1 &&
              map.box[axis] <= format::kMaxBox;
    }
    return right;
  }

  // Bytes of a CUtensorMapDataType's element; 0 where no kernel has such tensors.
  static std::uint64_t ElementSize(std::uint32_t type) {
    switch (type) {
      case format::kMapFloat16:
      case format::kMapBfloat16:
        return 2;
      case format::kMapFloat32:
        return 4;
      default:
        return 0;
    }
  }

  Status CheckBuffers() const {
    for (std::size_t i = 0; i < program_.buffers_.size(); ++i) {
      const format::Buffer& buffer = program_.buffers_[i];
      DYNAMO_MOE_RETURN_IF_ERROR(CheckText(buffer.name, "buffer", i));
      if (buffer.size >= program_.expressions_.size() || buffer.reserved != 0) {
        return Wrong("buffer ", i, " has the size of expression ", buffer.size, " of ",
                     program_.expressions_.size(), ", reserved ", buffer.reserved);
      }
    }
    return {};
  }

  Status CheckLaunches() const {
    const std::size_t expressions = program_.expressions_.size();
    // Which buffers there are depends on the range: CheckRanges.
    const std::size_t limits[format::kArgumentKinds] = {
        1,           format::kTensors, program_.buffers_.size(),
        expressions, expressions,      program_.tensor_maps_.size()};
    for (std::size_t i = 0; i < program_.arguments_.size(); ++i) {
      const format::Argument& argument = program_.arguments_[i];
      if (argument.kind >= format::kArgumentKinds) {
        return Wrong("argument ", i, " has kind ", argument.kind, " of ", format::kArgumentKinds);
      }
      if (argument.index >= limits[argument.kind]) {
        return Wrong("argument ", i, " of kind ", argument.kind, " has index ", argument.index,
                     ", must be below ", limits[argument.kind]);
      }
    }
    for (std::size_t i = 0; i < program_.launches_.size(); ++i) {
      const format::Launch& launch = program_.launches_[i];
      if (launch.kernel >= program_.kernels_.size() || launch.reserved != 0 ||
          !Within(launch.first_argument, launch.arguments, program_.arguments_.size())) {
        return Wrong("launch ", i, " has kernel ", launch.kernel, " of ", program_.kernels_.size(),
                     " with arguments ", launch.first_argument, " + ", launch.arguments, " of ",
                     program_.arguments_.size());
      }
      for (const std::uint32_t axis : launch.grid) {
        if (axis >= expressions) {
          return Wrong("launch ", i, " has a grid of expression ", axis, " of ", expressions);
        }
      }
      const Span<format::Argument> arguments = program_.arguments(launch);
      const auto maps = std::count_if(
          arguments.begin(), arguments.end(),
          [](const format::Argument& each) { return each.kind == format::kTensorMap; });
      if (arguments.size() > format::kMaxArguments || maps > format::kMaxTensorMaps) {
        return Wrong("launch ", i, " has ", arguments.size(), " arguments, of which ", maps,
                     " are tensor maps; at most ", format::kMaxArguments, " and ",
                     format::kMaxTensorMaps, " are permitted");
      }
    }
    return {};
  }

  Status CheckRanges() const {
    std::int64_t last = 0;
    if (program_.ranges_.size() == 0) {
      return Wrong("there are no ranges of tokens");
    }
    for (std::size_t i = 0; i < program_.ranges_.size(); ++i) {
      const format::Range& range = program_.ranges_[i];
      if (range.first_tokens != last + 1 || range.last_tokens < range.first_tokens ||
          range.last_tokens > std::numeric_limits<std::int32_t>::max()) {
        return Wrong("range ", i, " is ", range.first_tokens, "..", range.last_tokens,
                     " tokens; ranges follow one another from 1 to at most 2147483647");
      }
      last = range.last_tokens;
      if (!Within(range.first_launch, range.launches, program_.launches_.size()) ||
          !Within(range.first_buffer, range.buffers, program_.buffers_.size())) {
        return Wrong("range ", i, " has launches ", range.first_launch, " + ", range.launches,
                     " of ", program_.launches_.size(), " and buffers ", range.first_buffer, " + ",
                     range.buffers, " of ", program_.buffers_.size());
      }
      if (range.buffers > format::kMaxBuffers) {
        return Wrong("range ", i, " has ", range.buffers, " buffers, at most ", format::kMaxBuffers,
                     " are permitted");
      }
      for (const format::Launch& launch : program_.launches(range)) {
        for (const format::Argument& argument : program_.arguments(launch)) {
          if (argument.kind == format::kWorkspace && argument.index >= range.buffers) {
            return Wrong("range ", i, " has ", range.buffers, " buffers, a launch takes number ",
                         argument.index);
          }
        }
      }
    }
    return {};
  }

  static bool Within(std::uint64_t first, std::uint64_t count, std::uint64_t size) {
    return first <= size && count <= size - first;
  }

  Program& program_;
};

Status Program::Parse(const void* data, std::size_t size, Program* program) {
  Program parsed;
  DYNAMO_MOE_RETURN_IF_ERROR(
      ReadHeader("program", format::kProgramMagic, data, size, &parsed.header_));
  const auto* const bytes = static_cast<const char*>(data);
  parsed.bytes_.assign(bytes, bytes + size);
  DYNAMO_MOE_RETURN_IF_ERROR(ProgramChecker(&parsed).Run());
  *program = std::move(parsed);
  return {};
}

Sizes Program::SizesFor(std::int64_t tokens) const {
  Sizes sizes = {};
  sizes.values[format::kTokens] = tokens;
  sizes.values[format::kExperts] = layer().experts;
  sizes.values[format::kTopK] = layer().top_k;
  sizes.values[format::kWidth] = layer().width;
  sizes.values[format::kHidden] = layer().hidden;
  return sizes;
}

const format::Range* Program::RangeOf(std::int64_t tokens) const {
  for (const format::Range& range : ranges_) {
    if (range.first_tokens <= tokens && tokens <= range.last_tokens) {
      return &range;
    }
  }
  return nullptr;
}

Status Program::Evaluate(std::uint32_t expression, const Sizes& sizes, std::int64_t* value) const {
  const format::Expression& code = expressions_[expression];
  std::int64_t stack[format::kStackSize] = {};
  std::size_t depth = 0;
  for (const format::Instruction& each :
       instructions_.Part(code.first_instruction, code.instructions)) {
    if (each.opcode == format::kConstant) {
      stack[depth++] = each.value;
    } else if (each.opcode == format::kSymbol) {
      stack[depth++] = sizes.values[each.value];
    } else {
      --depth;
      if (!Apply(each.opcode, stack[depth - 1], stack[depth], &stack[depth - 1])) {
        return InvalidBundle("program: expression ", expression,
                             " overflows 64 bits or divides by less than 1 for ",
                             sizes.values[format::kTokens], " tokens");
      }
    }
  }
  *value = stack[0];
  return {};
}

Status ReadDirectory(const void* data, std::size_t size,
                     std::vector<format::DirectoryEntry>* programs) {
  format::FileHeader header;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadHeader("bundle", format::kFileMagic, data, size, &header));
  if (header.programs < 1 ||
      header.programs > (size - sizeof(header)) / sizeof(format::DirectoryEntry)) {
    return InvalidBundle("bundle: has ", header.programs, " programs in ", size,
                         " bytes; it must have at least 1, and their directory must fit");
  }
  const auto* const bytes = static_cast<const char*>(data);
  programs->resize(header.programs);
  const std::size_t directory = header.programs * sizeof(format::DirectoryEntry);
  std::memcpy(programs->data(), bytes + sizeof(header), directory);
  std::size_t end = sizeof(header) + directory;
  for (std::size_t i = 0; i < programs->size(); ++i) {
    const format::DirectoryEntry& entry = (*programs)[i];
    if (entry.offset % format::kProgramAlignment != 0 || entry.offset < end ||
        entry.offset > size || entry.size > size - entry.offset) {
      return InvalidBundle("bundle: program ", i, " has bytes ", entry.offset, " + ", entry.size,
                           "; it must begin at a multiple of ", format::kProgramAlignment,
                           " after ", end, " and end by ", size);
    }
    if (!AllZero(bytes + end, bytes + entry.offset)) {
      return InvalidBundle("bundle: the bytes before program ", i, " must be 0");
    }
    end = entry.offset + entry.size;
  }
  if (end != size) {
    return InvalidBundle("bundle: the programs end at byte ", end, ", the file at ", size);
  }
  return {};
}

}  // namespace dynamo_moe
