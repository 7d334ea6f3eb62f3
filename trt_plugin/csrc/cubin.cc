#include "cubin.h"

#include <cstdint>
#include <cstring>

#include "rules.h"

namespace dynamo_moe {
namespace {

// 64 bits, least significant byte first.
constexpr unsigned char kElfMagic[] = {0x7F, 'E', 'L', 'F', 2, 1};
constexpr std::uint16_t kCuda = 190;
// NOBITS: a section of which the file has no content.
constexpr std::uint32_t kEmpty = 8;

struct ElfHeader {
  unsigned char identity[16];
  std::uint16_t type;
  std::uint16_t machine;
  std::uint32_t version;
  std::uint64_t entry;
  std::uint64_t segments;
  std::uint64_t sections;
  std::uint32_t flags;
  std::uint16_t size;
  std::uint16_t segment_size;
  std::uint16_t segment_count;
  std::uint16_t section_size;
  std::uint16_t section_count;
  std::uint16_t names;
};
static_assert(sizeof(ElfHeader) == 64);

struct ElfSection {
  std::uint32_t name;
  std::uint32_t type;
  std::uint64_t flags;
  std::uint64_t address;
  std::uint64_t offset;
  std::uint64_t size;
  std::uint32_t link;
  std::uint32_t info;
  std::uint64_t alignment;
  std::uint64_t entry_size;
};
static_assert(sizeof(ElfSection) == 64);

constexpr std::uint64_t kSegmentSize = 56;

Status CheckTable(const char* what, std::uint64_t offset, std::uint64_t count, std::uint64_t record,
                  std::uint64_t expected, std::size_t size) {
  if (count != 0 && record != expected) {
    return InvalidBundle("a record of the cubin's ", what, " must have ", expected, " bytes, has ",
                         record);
  }
  // At most 65535 records of 64 bytes.
  return CheckWithin(Text("bytes of the cubin's ", what).c_str(), offset, count * expected, size);
}

}  // namespace

Status CheckImage(const void* image, std::size_t size) {
  const auto* const bytes = static_cast<const char*>(image);
  ElfHeader header;
  if (size < sizeof(header)) {
    return InvalidBundle("the cubin must have ", sizeof(header), " bytes or more, has ", size);
  }
  std::memcpy(&header, bytes, sizeof(header));
  if (std::memcmp(header.identity, kElfMagic, sizeof(kElfMagic)) != 0) {
    return InvalidBundle("the cubin is no 64-bit ELF file, its first bytes are others");
  }
  if (header.machine != kCuda) {
    return InvalidBundle("the cubin's machine must be ", kCuda, " (CUDA), is ", header.machine);
  }
  // Their number would be elsewhere.
  if (header.section_count == 0) {
    return InvalidBundle("the cubin must have 1 section or more, has 0");
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckTable("segments", header.segments, header.segment_count,
                                        header.segment_size, kSegmentSize, size));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckTable("sections", header.sections, header.section_count,
                                        header.section_size, sizeof(ElfSection), size));
  for (std::uint16_t i = 0; i < header.section_count; ++i) {
    ElfSection section;
    std::memcpy(&section, bytes + header.sections + (i * sizeof(section)), sizeof(section));
    if (section.type != kEmpty) {
      DYNAMO_MOE_RETURN_IF_ERROR(CheckWithin(Text("bytes of the cubin's section ", i).c_str(),
                                             section.offset, section.size, size));
    }
  }
  return {};
}

}  // namespace dynamo_moe
