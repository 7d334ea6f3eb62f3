#include "bundle/checks.h"

#include <cstdint>
#include <cstring>

namespace dynamo_moe {
namespace {

// 64 bits, little-endian.
constexpr unsigned char kElfMagic[] = {0x7F, 'E', 'L', 'F', 2, 1};
constexpr std::uint16_t kCuda = 190;
// SHT_NOBITS: the section has no content in the file.
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
    return InvalidBundle("a record of the cubin's ", what, " must have ", expected, " bytes, got ",
                         record);
  }
  // At most 65535 records of 64 bytes.
  return CheckWithin(Text("bytes of the cubin's ", what).c_str(), offset, count * expected, size);
}

// Bytes per element of a CUtensorMapDataType; 0 if no kernel has such tensors.
std::uint64_t ElementSize(std::uint32_t type) {
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

// The bytes that a CUtensorMapSwizzle other than 0 permutes: 32, 64 or 128.
std::uint64_t SwizzleSpan(std::uint32_t swizzle) { return std::uint64_t{16} << swizzle; }

Status CheckAxis(const format::TensorMap& record, std::uint32_t axis) {
  if (axis >= record.rank) {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("a size beyond the rank", record.sizes[axis]));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("a stride beyond the rank", record.strides[axis]));
    return CheckZero("a box beyond the rank", record.box[axis]);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("size", record.sizes[axis], 1, format::kMaxSize));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("box", record.box[axis], 1, format::kMaxBox));
  if (axis == 0) {
    const std::uint64_t element = ElementSize(record.type);
    if (record.strides[axis] != element) {
      return InvalidBundle("stride must be an element's size, ", element, ", got ",
                           record.strides[axis]);
    }
    const std::uint64_t bytes = record.box[axis] * element;
    if (record.swizzle != 0 && bytes > SwizzleSpan(record.swizzle)) {
      return InvalidBundle("the box in bytes must be at most ", SwizzleSpan(record.swizzle),
                           ", the swizzle's span, got ", bytes);
    }
    return CheckMultiple("the box in bytes", bytes, format::kBoxAlignment);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckMultiple("stride", record.strides[axis], format::kBoxAlignment));
  return CheckIn("stride", record.strides[axis], format::kBoxAlignment, format::kMaxStride - 1);
}

}  // namespace

Status CheckImage(const void* image, std::size_t size) {
  const auto* const bytes = static_cast<const char*>(image);
  ElfHeader header;
  if (size < sizeof(header)) {
    return InvalidBundle("the cubin must have ", sizeof(header), " bytes or more, got ", size);
  }
  std::memcpy(&header, bytes, sizeof(header));
  if (std::memcmp(header.identity, kElfMagic, sizeof(kElfMagic)) != 0) {
    return InvalidBundle(
        "the cubin must be a 64-bit little-endian ELF file, its first bytes differ");
  }
  if (header.machine != kCuda) {
    return InvalidBundle("the cubin's machine must be ", kCuda, " (CUDA), got ", header.machine);
  }
  // With 0 here, ELF keeps the count elsewhere.
  if (header.section_count == 0) {
    return InvalidBundle("the cubin must have 1 section or more, got 0");
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

Status CheckTensorMap(const format::TensorMap& record, std::size_t state) {
  if (record.kind != format::kTensor && record.kind != format::kStatePointer) {
    return InvalidBundle("kind must be ", format::kTensor, " or ", format::kStatePointer, ", got ",
                         record.kind);
  }
  const bool is_tensor = record.kind == format::kTensor;
  DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow(is_tensor ? "tensor" : "the state's part", record.index,
                                        is_tensor ? std::size_t{format::kTensors} : state));
  if (ElementSize(record.type) == 0) {
    return InvalidBundle("type must be float16 (", format::kMapFloat16, "), float32 (",
                         format::kMapFloat32, ") or bfloat16 (", format::kMapBfloat16, "), got ",
                         record.type);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("rank", record.rank, 2, format::kMaxRank));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("swizzle", record.swizzle, 0, format::kMaxSwizzle));
  for (std::uint32_t axis = 0; axis < format::kMaxRank; ++axis) {
    if (const Status status = CheckAxis(record, axis); !status.ok()) {
      return InvalidBundle("dimension ", axis, ": ", status.message());
    }
  }
  for (const std::uint32_t reserved : record.reserved) {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("reserved", reserved));
  }
  return {};
}

}  // namespace dynamo_moe
