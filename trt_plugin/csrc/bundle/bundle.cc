#include "bundle/bundle.h"

#include <algorithm>
#include <cstring>
#include <limits>
#include <utility>

#include "bundle/checks.h"
#include "bundle/checksum.h"
#include "bundle/layer.h"

namespace dynamo_moe {
namespace {

// Reads the header of a file or of a program; `kind` says which of the two.
template <typename Header>
Status ReadHeader(const char* kind, const unsigned char (&magic)[format::kMagicSize],
                  const void* data, std::size_t size, Header* header) {
  if (data == nullptr) {
    return InvalidArgument("the data is a null pointer");
  }
  if (size < sizeof(Header)) {
    return InvalidBundle("truncated: the header has ", sizeof(Header), " bytes, got ", size);
  }
  std::memcpy(header, data, sizeof(Header));
  if (std::memcmp(header->magic, magic, sizeof(magic)) != 0) {
    return InvalidBundle("not a kernel ", kind, ": its first bytes differ");
  }
  if (header->version != format::kVersion) {
    return InvalidBundle("the version must be ", format::kVersion, ", got ", header->version,
                         ": compile the bundle, or build the engine, anew");
  }
  if (header->size != size) {
    return InvalidBundle(size < header->size ? "truncated" : "too long", ": the header says ",
                         header->size, " bytes, got ", size);
  }
  const std::uint32_t checksum =
      ChecksumWithHole(static_cast<const unsigned char*>(data), size, format::kChecksumOffset);
  if (header->checksum != checksum) {
    return InvalidBundle("damaged: the checksum is ", checksum, ", the header says ",
                         header->checksum);
  }
  return CheckZero("reserved", header->reserved);
}

// A failure's message, after the name of what was read.
Status Within(const std::string& name, const Status& status) {
  return status.ok() ? status : Status(status.code(), Text(name, ": ", status.message()));
}

bool AllZero(const char* begin, const char* end) {
  return std::all_of(begin, end, [](char byte) { return byte == 0; });
}

// The first byte that is not UTF-8 (RFC 3629) or begins a control character; the size if there is
// none.
std::size_t FindInvalidText(std::string_view text) {
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
      return at;
    }
    for (std::size_t i = 1; i < length; ++i) {
      const auto next = static_cast<unsigned char>(text[at + i]);
      if ((next & 0xC0) != 0x80) {
        return at;
      }
      code = (code << 6) | (next & 0x3F);
    }
    const bool control = code < 0x20 || (code >= 0x7F && code < 0xA0);
    if (code < least || code > 0x10FFFF || (code >= 0xD800 && code < 0xE000) || control) {
      return at;
    }
    at += length;
  }
  return at;
}

}  // namespace

// Checks the tables of a program one after another.
class ProgramChecker {
 public:
  explicit ProgramChecker(Program* program) : program_(*program) {}

  Status Run() {
    DYNAMO_MOE_RETURN_IF_ERROR(FindTables());
    DYNAMO_MOE_RETURN_IF_ERROR(CheckLayer(program_.header_.layer));
    return CheckTables();
  }

 private:
  template <typename T>
  Status FindTable(std::size_t index, const char* name, std::size_t* end, Span<T>* table) {
    const format::Table& entry = program_.header_.tables[index];
    const std::size_t size = program_.bytes_.size();
    if (entry.offset % format::kTableAlignment != 0 || entry.offset < *end || entry.offset > size) {
      return InvalidBundle("table ", name, " must begin at a multiple of ", format::kTableAlignment,
                           " in ", *end, "..", size, ", got ", entry.offset);
    }
    if (entry.count > (size - entry.offset) / sizeof(T)) {
      return InvalidBundle("table ", name, " has ", entry.count, " records of ", sizeof(T),
                           " bytes from byte ", entry.offset, " on, but the program has ", size,
                           " bytes");
    }
    const char* const bytes = program_.bytes_.data();
    if (!AllZero(bytes + *end, bytes + entry.offset)) {
      return InvalidBundle("the bytes before table ", name, " must be 0");
    }
    *table = {reinterpret_cast<const T*>(bytes + entry.offset), entry.count};
    *end = entry.offset + entry.count * sizeof(T);
    return {};
  }

  Status FindTables() {
    std::size_t end = sizeof(format::ProgramHeader);
    Program& p = program_;
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kRanges, "ranges", &end, &p.ranges_));
    DYNAMO_MOE_RETURN_IF_ERROR(FindTable(format::kState, "state", &end, &p.state_));
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
      return InvalidBundle("the tables end at byte ", end, ", the program at ", p.bytes_.size());
    }
    return {};
  }

  // Checks each record of a table and names the first one that fails.
  template <typename T, typename Check>
  static Status CheckEach(const char* what, Span<T> records, const Check& check) {
    for (std::size_t i = 0; i < records.size(); ++i) {
      if (const Status status = check(records[i]); !status.ok()) {
        return InvalidBundle(what, " ", i, ": ", status.message());
      }
    }
    return {};
  }

  Status CheckTables() const {
    const std::size_t ranges = program_.ranges_.size();
    if (ranges < 1 || ranges > format::kMaxRanges) {
      return InvalidBundle("must have 1 to ", format::kMaxRanges, " ranges of tokens, got ",
                           ranges);
    }
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckEach("expression", program_.expressions_,
                  [this](const auto& expression) { return CheckInstructions(expression); }));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckEach(
        "kernel", program_.kernels_, [this](const auto& kernel) { return CheckKernel(kernel); }));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckState());
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckEach("tensor map", program_.tensor_maps_,
                  [this](const auto& map) { return CheckTensorMap(map, program_.state_.size()); }));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckEach("buffer", program_.buffers_, [this](const auto& buffer) {
      return CheckBuffer(buffer, 0);
    }));
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckEach("argument", program_.arguments_,
                  [this](const auto& argument) { return CheckArgument(argument); }));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckEach(
        "launch", program_.launches_, [this](const auto& launch) { return CheckLaunch(launch); }));
    std::int64_t last = 0;
    return CheckEach("range", program_.ranges_,
                     [this, &last](const auto& range) { return CheckRange(range, &last); });
  }

  Status CheckInstructions(const format::Expression& expression) const {
    const Span<format::Instruction> all = program_.instructions_;
    DYNAMO_MOE_RETURN_IF_ERROR(CheckWithin("instructions", expression.first_instruction,
                                           expression.instructions, all.size()));
    return CheckExpression(all.Part(expression.first_instruction, expression.instructions));
  }

  Status CheckIndex(const char* field, std::uint32_t expression) const {
    return CheckBelow(field, expression, program_.expressions_.size());
  }

  Status CheckText(const char* field, const format::String& string) const {
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckWithin(field, string.offset, string.size, program_.strings_.size()));
    if (string.size > format::kMaxText) {
      return InvalidBundle(field, " must be at most ", format::kMaxText, ", got ", string.size);
    }
    const std::size_t wrong = FindInvalidText(program_.text(string));
    return wrong == string.size
               ? Status()
               : InvalidBundle(field, " must be UTF-8 without control characters, byte ", wrong,
                               " breaks that");
  }

  Status CheckKernel(const format::Kernel& kernel) const {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckText("the name's bytes", kernel.name));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckText("the description's bytes", kernel.description));
    if (kernel.name.size == 0 || kernel.image_size == 0) {
      return InvalidBundle("name and image must have 1 byte or more, got ", kernel.name.size,
                           " and ", kernel.image_size);
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckWithin("the image's bytes", kernel.image_offset,
                                           kernel.image_size, program_.images_.size()));
    const std::uint64_t images = program_.header_.tables[format::kImages].offset;
    DYNAMO_MOE_RETURN_IF_ERROR(CheckMultiple(
        "the image's place in the program", images + kernel.image_offset, format::kImageAlignment));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckImage(program_.image(kernel), kernel.image_size));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("warps", kernel.warps, 1, format::kMaxWarps));
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckIn("shared memory in bytes", kernel.shared_memory, 0, format::kMaxSharedMemory));
    // Events order launches on two streams by their ends.
    const std::uint32_t flags = IsOffloaded() ? 0 : format::kDependentLaunch;
    DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("flags", kernel.flags, 0, flags));
    return CheckZero("reserved", kernel.reserved);
  }

  Status CheckBuffer(const format::Buffer& buffer, std::uint32_t most_flags) const {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckText("the name's bytes", buffer.name));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckIndex("the size's expression", buffer.size));
    return CheckIn("flags", buffer.flags, 0, most_flags);
  }

  bool IsOffloaded() const { return program_.layer().resident_experts != 0; }

  Status CheckState() const {
    const std::uint32_t most = IsOffloaded() ? format::kMaxBuffers : 0;
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckIn("the number of the state's parts", program_.state_.size(), 0, most));
    return CheckEach("state", program_.state_, [this](const auto& buffer) -> Status {
      DYNAMO_MOE_RETURN_IF_ERROR(CheckBuffer(buffer, format::kZeroed));
      const auto instructions = program_.instructions(program_.expressions_[buffer.size]);
      const bool constant = std::none_of(
          instructions.begin(), instructions.end(), [](const format::Instruction& each) {
            return each.opcode == format::kSymbol &&
                   (each.value == format::kTokens || each.value == format::kWave);
          });
      return constant ? Status() : InvalidBundle("the size must not depend on a call");
    });
  }

  Status CheckArgument(const format::Argument& argument) const {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow("kind", argument.kind, format::kArgumentKinds));
    switch (argument.kind) {
      case format::kNull:
        return CheckZero("a null pointer's index", argument.index);
      case format::kTensor:
        return CheckBelow("tensor", argument.index, format::kTensors);
      case format::kWorkspace:
        // The range says how many there are: see CheckRange.
        return {};
      case format::kTensorMap:
        return CheckBelow("tensor map", argument.index, program_.tensor_maps_.size());
      case format::kStatePointer:
        return CheckBelow("the state's part", argument.index, program_.state_.size());
      default:
        return CheckIndex("expression", argument.index);
    }
  }

  Status CheckLaunch(const format::Launch& launch) const {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow("kernel", launch.kernel, program_.kernels_.size()));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckWithin("arguments", launch.first_argument, launch.arguments,
                                           program_.arguments_.size()));
    for (const std::uint32_t axis : launch.grid) {
      DYNAMO_MOE_RETURN_IF_ERROR(CheckIndex("the grid's expression", axis));
    }
    DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("flags", launch.flags, 0, format::kOnSide));
    const Span<format::Argument> arguments = program_.arguments(launch);
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckIn("the number of arguments", arguments.size(), 0, format::kMaxArguments));
    const auto maps =
        std::count_if(arguments.begin(), arguments.end(),
                      [](const format::Argument& each) { return each.kind == format::kTensorMap; });
    return CheckIn("the number of tensor maps", maps, 0, format::kMaxTensorMaps);
  }

  // Checks that a range follows one that ends with `last` tokens, and sets `last` to its own end.
  Status CheckRange(const format::Range& range, std::int64_t* last) const {
    if (range.first_tokens != *last + 1 || range.last_tokens < range.first_tokens ||
        range.last_tokens > format::kMaxTokens) {
      return InvalidBundle("must go from ", *last + 1, " tokens to at most ", format::kMaxTokens,
                           ", got ", range.first_tokens, " to ", range.last_tokens);
    }
    *last = range.last_tokens;
    const std::uint64_t launches =
        std::uint64_t{range.launches} + range.wave_launches + range.epilogue_launches;
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckWithin("launches", range.first_launch, launches, program_.launches_.size()));
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckWithin("buffers", range.first_buffer, range.buffers, program_.buffers_.size()));
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckIn("the number of buffers", range.buffers, 0, format::kMaxBuffers));
    DYNAMO_MOE_RETURN_IF_ERROR(
        CheckIn("the number of launches", launches, 0, format::kMaxLaunches));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("reserved", range.reserved));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckWaves(range));
    for (const format::Launch& launch :
         program_.launches_.Part(range.first_launch, static_cast<std::size_t>(launches))) {
      for (const format::Argument& argument : program_.arguments(launch)) {
        if (argument.kind == format::kWorkspace) {
          DYNAMO_MOE_RETURN_IF_ERROR(
              CheckBelow("a launch's buffer", argument.index, range.buffers));
        }
      }
    }
    return {};
  }

  // Only the launches of a wave may be on the second stream and wait for others, which are then on
  // the other stream.
  Status CheckWaves(const format::Range& range) const {
    if (range.wave_launches == 0) {
      DYNAMO_MOE_RETURN_IF_ERROR(
          CheckZero("the number of launches after no wave", range.epilogue_launches));
      DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("the waves' expression without a wave", range.waves));
    } else {
      const std::uint32_t most = IsOffloaded() ? format::kMaxWaveLaunches : 0;
      DYNAMO_MOE_RETURN_IF_ERROR(
          CheckIn("the number of launches of a wave", range.wave_launches, 0, most));
      DYNAMO_MOE_RETURN_IF_ERROR(CheckIndex("the waves' expression", range.waves));
    }
    for (const auto& outside : {program_.launches(range), program_.epilogue(range)}) {
      for (const format::Launch& launch : outside) {
        DYNAMO_MOE_RETURN_IF_ERROR(
            CheckZero("the flags of a launch outside of waves", launch.flags));
        DYNAMO_MOE_RETURN_IF_ERROR(
            CheckZero("what a launch outside of waves waits for", launch.after));
      }
    }
    const Span<format::Launch> wave = program_.wave(range);
    for (const format::Launch& launch : wave) {
      for (std::uint32_t other = 0; other < format::kMaxWaveLaunches; ++other) {
        if ((launch.after >> other & 1) == 0) {
          continue;
        }
        DYNAMO_MOE_RETURN_IF_ERROR(
            CheckBelow("a launch that another waits for", other, wave.size()));
        if (wave[other].flags == launch.flags) {
          return InvalidBundle("a launch must wait for one on the other stream, launch ", other,
                               " of the wave is on the same");
        }
      }
    }
    return {};
  }

  Program& program_;
};

Status Program::Parse(const void* data, std::size_t size, Program* program, const std::string& name,
                      std::shared_ptr<const std::string> owner) {
  const auto parse = [&]() -> Status {
    Program parsed;
    DYNAMO_MOE_RETURN_IF_ERROR(
        ReadHeader("program", format::kProgramMagic, data, size, &parsed.header_));
    parsed.bytes_ = {static_cast<const char*>(data), size};
    if (owner == nullptr) {
      owner = std::make_shared<const std::string>(parsed.bytes_);
      parsed.bytes_ = *owner;
    }
    parsed.owner_ = std::move(owner);
    DYNAMO_MOE_RETURN_IF_ERROR(ProgramChecker(&parsed).Run());
    *program = std::move(parsed);
    return {};
  };
  return Within(name, parse());
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
  return dynamo_moe::Evaluate(instructions(expressions_[expression]), sizes, value)
             ? Status()
             : InvalidBundle("program: expression ", expression,
                             " overflows 64 bits or divides by less than 1 for ",
                             sizes.values[format::kTokens], " tokens");
}

namespace {

constexpr std::uint32_t kFirstSpecificArchitecture = 90;
constexpr std::uint32_t kTegraArchitecture = 87;

// Reads where each program lies. Checks the file, not what is in the programs.
Status ReadDirectory(const char* bytes, std::size_t size,
                     std::vector<format::DirectoryEntry>* programs) {
  format::FileHeader header;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadHeader("bundle", format::kFileMagic, bytes, size, &header));
  if (header.programs < 1 ||
      header.programs > (size - sizeof(header)) / sizeof(format::DirectoryEntry)) {
    return InvalidBundle("must have 1 program or more, whose directory fits ", size, " bytes, got ",
                         header.programs);
  }
  programs->resize(header.programs);
  const std::size_t directory = header.programs * sizeof(format::DirectoryEntry);
  std::memcpy(programs->data(), bytes + sizeof(header), directory);
  std::size_t end = sizeof(header) + directory;
  for (std::size_t i = 0; i < programs->size(); ++i) {
    const format::DirectoryEntry& entry = (*programs)[i];
    if (entry.offset % format::kProgramAlignment != 0 || entry.offset < end ||
        entry.offset > size || entry.size > size - entry.offset) {
      return InvalidBundle(
          "program ", i, " must begin at a multiple of ", format::kProgramAlignment, " in ", end,
          "..", size, " and end within the file, got ", entry.size, " bytes from ", entry.offset);
    }
    if (!AllZero(bytes + end, bytes + entry.offset)) {
      return InvalidBundle("the bytes before program ", i, " must be 0");
    }
    end = entry.offset + entry.size;
  }
  if (end != size) {
    return InvalidBundle("the programs end at byte ", end, ", the file at ", size);
  }
  return {};
}

}  // namespace

bool RunsOn(std::uint32_t program, std::uint32_t device) {
  const bool portable = device < kFirstSpecificArchitecture && device != kTegraArchitecture &&
                        program != kTegraArchitecture;
  return program == device || (portable && program / 10 == device / 10 && program < device);
}

bool SameLayer(const dynamo_moe_layer& a, const dynamo_moe_layer& b) {
  // The format prescribes this: the record has no padding, and floats are written by one rule.
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

bool IsBundle(std::string_view bytes) {
  return bytes.size() >= format::kMagicSize &&
         std::memcmp(bytes.data(), format::kFileMagic, format::kMagicSize) == 0;
}

std::string BundleOf(const std::vector<std::string_view>& programs) {
  format::FileHeader header = {};
  std::memcpy(header.magic, format::kFileMagic, format::kMagicSize);
  header.version = format::kVersion;
  header.programs = static_cast<std::uint32_t>(programs.size());
  std::vector<format::DirectoryEntry> directory;
  std::size_t end = sizeof(header) + programs.size() * sizeof(format::DirectoryEntry);
  for (const std::string_view program : programs) {
    constexpr std::size_t alignment = format::kProgramAlignment;
    const std::size_t offset = (end + alignment - 1) / alignment * alignment;
    directory.push_back({offset, program.size()});
    end = offset + program.size();
  }
  header.size = end;
  std::string bytes(end, '\0');
  std::memcpy(bytes.data(), &header, sizeof(header));
  std::memcpy(bytes.data() + sizeof(header), directory.data(),
              directory.size() * sizeof(format::DirectoryEntry));
  for (std::size_t i = 0; i < programs.size(); ++i) {
    bytes.replace(directory[i].offset, programs[i].size(), programs[i]);
  }
  header.checksum = ChecksumWithHole(reinterpret_cast<const unsigned char*>(bytes.data()), end,
                                     format::kChecksumOffset);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

Status Bundle::Open(const void* data, std::size_t size, Bundle* bundle) {
  const auto* const bytes = static_cast<const char*>(data);
  std::vector<format::DirectoryEntry> directory;
  DYNAMO_MOE_RETURN_IF_ERROR(Within("bundle", ReadDirectory(bytes, size, &directory)));
  for (const format::DirectoryEntry& each : directory) {
    const std::size_t index = bundle->programs_.size();
    Program program;
    DYNAMO_MOE_RETURN_IF_ERROR(
        Program::Parse(bytes + each.offset, each.size, &program, Text("program ", index)));
    bundle->programs_.push_back(
        {program.layer(), program.architecture(), each.offset, {bytes + each.offset, each.size}});
  }
  return {};
}

Status Bundle::Find(const dynamo_moe_layer& layer, std::uint32_t architecture,
                    std::string_view* program) const {
  std::uint32_t best = 0;
  std::string others;
  for (const Entry& each : programs_) {
    if (!SameLayer(each.layer, layer)) {
      continue;
    }
    if (RunsOn(each.architecture, architecture) && each.architecture > best) {
      best = each.architecture;
      *program = each.bytes;
    }
    others += Text(others.empty() ? "" : ", ", "sm_", each.architecture);
  }
  if (best != 0) {
    return {};
  }
  if (others.empty()) {
    return {DYNAMO_MOE_NOT_FOUND,
            Text("the bundle has ", programs_.size(), " programs, none of this layer (",
                 layer.experts, " experts, top_k ", layer.top_k, ", width ", layer.width,
                 ", hidden ", layer.hidden, ")")};
  }
  return {DYNAMO_MOE_NOT_FOUND,
          Text("the bundle has this layer for ", others, ", the device is sm_", architecture)};
}

}  // namespace dynamo_moe
