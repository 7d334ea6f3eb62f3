// The records of a bundle, as docs/reference/bundle.md describes them; layer.h has the codes in a
// layer's record. This header includes only the standard library and the C interface.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dynamo_moe.h"

namespace dynamo_moe::format {

static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "records are read in place");

inline constexpr std::uint32_t kVersion = 6;
inline constexpr std::size_t kMagicSize = 8;
inline constexpr unsigned char kFileMagic[kMagicSize] = {'M', 'O', 'E', 'K', 13, 10, 26, 10};
inline constexpr unsigned char kProgramMagic[kMagicSize] = {'M', 'O', 'E', 'P', 13, 10, 26, 10};
inline constexpr std::size_t kProgramAlignment = 64;
inline constexpr std::size_t kImageAlignment = 64;
inline constexpr std::size_t kTableAlignment = 8;
inline constexpr std::uint64_t kWorkspaceAlignment = 256;
inline constexpr std::size_t kStackSize = 16;
inline constexpr std::uint32_t kMaxRank = 5;
// The launcher keeps these on the stack during a call.
inline constexpr std::uint32_t kMaxArguments = 64;
inline constexpr std::uint32_t kMaxTensorMaps = 4;
inline constexpr std::uint32_t kMaxBuffers = 32;
// Records and strings may be shared. Without these limits, checking a small file could take very
// long, and describing it could take all memory.
inline constexpr std::uint32_t kMaxRanges = 256;
inline constexpr std::uint32_t kMaxLaunches = 64;  // Of a range, in all.
inline constexpr std::uint32_t kMaxWaveLaunches = 32;
inline constexpr std::uint32_t kMaxInstructions = 256;
inline constexpr std::uint32_t kMaxText = 4096;  // Bytes of a name or description.
inline constexpr std::int64_t kMaxTokens = 2147483647;
inline constexpr std::uint32_t kMaxWarps = 32;
inline constexpr std::uint32_t kMaxSharedMemory = 1U << 20;

// The limits of cuTensorMapEncodeTiled, for swizzles of up to 128 bytes; strides are in bytes.
inline constexpr std::uint32_t kMaxSwizzle = 3;
inline constexpr std::uint32_t kMaxBox = 256;
inline constexpr std::uint64_t kBoxAlignment = 16;
inline constexpr std::uint64_t kMaxSize = std::uint64_t{1} << 32;
inline constexpr std::uint64_t kMaxStride = std::uint64_t{1} << 40;
// CUtensorMapDataType
enum MapType : std::uint32_t { kMapFloat16 = 6, kMapFloat32 = 7, kMapBfloat16 = 9 };

struct FileHeader {
  unsigned char magic[kMagicSize];
  std::uint32_t version;
  std::uint32_t programs;
  std::uint64_t size;
  std::uint32_t checksum;
  std::uint32_t reserved;
};
static_assert(sizeof(FileHeader) == 32);

struct DirectoryEntry {
  std::uint64_t offset;
  std::uint64_t size;
};
static_assert(sizeof(DirectoryEntry) == 16);

struct Table {
  std::uint64_t offset;
  std::uint64_t count;
};

enum TableIndex : std::size_t {
  kRanges,
  kState,
  kBuffers,
  kLaunches,
  kArguments,
  kTensorMaps,
  kKernels,
  kExpressions,
  kInstructions,
  kStrings,
  kImages,
  kTables,
};

struct ProgramHeader {
  unsigned char magic[kMagicSize];
  std::uint32_t version;
  std::uint32_t architecture;
  std::uint64_t size;
  std::uint32_t checksum;
  std::uint32_t reserved;
  dynamo_moe_layer layer;
  Table tables[kTables];
};
static_assert(sizeof(dynamo_moe_layer) == 112);
static_assert(sizeof(ProgramHeader) == 320);

// Where the checksum lies, in a file and in a program.
inline constexpr std::size_t kChecksumOffset = 24;
static_assert(offsetof(FileHeader, checksum) == kChecksumOffset);
static_assert(offsetof(ProgramHeader, checksum) == kChecksumOffset);

// Its launches follow one another: those before the waves, those of a wave, those after the waves.
struct Range {
  std::int64_t first_tokens;
  std::int64_t last_tokens;
  std::uint32_t first_launch;
  std::uint32_t launches;
  std::uint32_t wave_launches;
  std::uint32_t epilogue_launches;
  std::uint32_t first_buffer;
  std::uint32_t buffers;
  std::uint32_t waves;
  std::uint32_t reserved;
};
static_assert(sizeof(Range) == 48);

struct String {
  std::uint32_t offset;
  std::uint32_t size;
};

struct Buffer {
  String name;
  std::uint32_t size;
  std::uint32_t flags;
};
static_assert(sizeof(Buffer) == 16);
// A new state's buffer is filled with 0.
inline constexpr std::uint32_t kZeroed = 1;

struct Launch {
  std::uint32_t kernel;
  std::uint32_t first_argument;
  std::uint32_t arguments;
  std::uint32_t grid[3];
  std::uint32_t flags;
  std::uint32_t after;  // A bit for each launch of a wave.
};
static_assert(sizeof(Launch) == 32);
// The launch is on the second stream.
inline constexpr std::uint32_t kOnSide = 1;

enum ArgumentKind : std::uint32_t {
  kNull,
  kTensor,
  kWorkspace,
  kInt32,
  kInt64,
  kTensorMap,
  kStatePointer,
  kArgumentKinds,
};
inline constexpr const char* kArgumentKindNames[kArgumentKinds] = {
    "null", "tensor", "workspace", "i32", "i64", "tensor_map", "state"};

struct Argument {
  std::uint32_t kind;
  std::uint32_t index;
};
static_assert(sizeof(Argument) == 8);

struct TensorMap {
  std::uint32_t index;
  std::uint32_t type;
  std::uint32_t rank;
  std::uint32_t swizzle;
  std::uint64_t sizes[kMaxRank];
  std::uint64_t strides[kMaxRank];
  std::uint32_t box[kMaxRank];
  std::uint32_t kind;  // Of what the index names: kTensor, or kStatePointer.
  std::uint32_t reserved[6];
};
static_assert(sizeof(TensorMap) == 144);

struct Kernel {
  String name;
  String description;
  std::uint64_t image_offset;
  std::uint64_t image_size;
  std::uint32_t warps;
  std::uint32_t shared_memory;
  std::uint32_t flags;
  std::uint32_t registers;
  std::uint32_t local_memory;
  std::uint32_t reserved;
};
static_assert(sizeof(Kernel) == 56);
inline constexpr std::uint32_t kDependentLaunch = 1;

struct Expression {
  std::uint32_t first_instruction;
  std::uint32_t instructions;
};
static_assert(sizeof(Expression) == 8);

enum Opcode : std::uint32_t {
  kConstant,
  kSymbol,
  kAdd,
  kSubtract,
  kMultiply,
  kDivideDown,
  kDivideUp,
  kMinimum,
  kMaximum,
  kOpcodes,
};

enum Symbol : std::uint32_t {
  kTokens,
  kExperts,
  kTopK,
  kWidth,
  kHidden,
  kWave,
  kSymbols,
};

struct Instruction {
  std::uint32_t opcode;
  std::uint32_t reserved;
  std::int64_t value;
};
static_assert(sizeof(Instruction) == 16);

enum Tensor : std::uint32_t {
  kX,
  kRouterWeight,
  kRouterBias,
  kSelectionBias,
  kExpertIds,
  kExpertWeights,
  kW1,
  kW1Scales,
  kW1ZeroPoints,
  kW1GlobalScales,
  kB1,
  kW2,
  kW2Scales,
  kW2ZeroPoints,
  kW2GlobalScales,
  kB2,
  kY,
  kTensors,
};

}  // namespace dynamo_moe::format
