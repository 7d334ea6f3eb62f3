// A fuzz target: any bytes, read as a bundle, are refused with a message or can be used.
//
// libFuzzer calls LLVMFuzzerTestOneInput; where there is none, fuzz_driver.cc does. Programs that
// are accepted are launched on the stand-in driver, if libcuda.so.1 is that.
#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "bundle/checksum.h"
#include "bundle/format.h"
#include "dynamo_moe.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, \
                   dynamo_moe_last_error());                                      \
      std::abort();                                                               \
    }                                                                             \
  } while (false)

namespace {

namespace format = dynamo_moe::format;

constexpr std::uint32_t kDevice = 90;
// Repairing more programs would take most of the time.
constexpr std::uint32_t kMostRepaired = 16;

template <typename Function>
Function Find(void* library, const char* name) {
  const auto function = reinterpret_cast<Function>(dlsym(library, name));
  CHECK(function != nullptr);
  return function;
}

// Launches a program with a cache, which only offloaded layers take, unless it is too large. Any
// status is right.
void LaunchOffloaded(dynamo_moe_program* program, const dynamo_moe_tensors& tensors) {
  constexpr std::size_t kMostState = std::size_t{1} << 20;
  std::size_t state = 0;
  dynamo_moe_cache* cache = nullptr;
  CHECK(dynamo_moe_cache_open(program, nullptr, nullptr, 0, &cache) == DYNAMO_MOE_OK);
  if (dynamo_moe_program_state(program, &state) == DYNAMO_MOE_OK && state < kMostState) {
    static_cast<void>(
        dynamo_moe_cache_enqueue(cache, 30, &tensors, tensors.y, std::size_t{1} << 62, nullptr));
  }
  dynamo_moe_cache_close(cache);
}

// Launches a program; the stand-in touches no tensors. Any status is right.
void Launch(dynamo_moe_program* program) {
  void* const memory = reinterpret_cast<void*>(std::uintptr_t{1} << 40);
  const dynamo_moe_tensors tensors = {memory, memory, memory, memory, memory, memory,
                                      memory, memory, memory, memory, memory, memory,
                                      memory, memory, memory, memory, memory};
  for (const std::int64_t tokens :
       {std::int64_t{1}, std::int64_t{30}, std::int64_t{50}, std::int64_t{1} << 62}) {
    std::size_t workspace = 0;
    static_cast<void>(dynamo_moe_program_workspace(program, tokens, &workspace));
    static_cast<void>(dynamo_moe_program_enqueue(program, tokens, &tensors, memory,
                                                 std::size_t{1} << 62, nullptr));
  }
  LaunchOffloaded(program, tensors);
}

void UseProgram(const std::vector<char>& bundle, std::uint32_t index) {
  dynamo_moe_layer layer;
  std::uint32_t architecture = 0;
  const void* data = nullptr;
  std::size_t size = 0;
  CHECK(dynamo_moe_bundle_program(bundle.data(), bundle.size(), index, &layer, &architecture, &data,
                                  &size) == DYNAMO_MOE_OK);
  // The same bytes in a block of their own.
  const std::vector<char> bytes(static_cast<const char*>(data),
                                static_cast<const char*>(data) + size);
  dynamo_moe_program* program = nullptr;
  CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &program) == DYNAMO_MOE_OK);
  Launch(program);
  dynamo_moe_program_close(program);
}

void Use(const std::vector<char>& bundle) {
  std::uint32_t count = 0;
  char* json = nullptr;
  const dynamo_moe_status status = dynamo_moe_bundle_count(bundle.data(), bundle.size(), &count);
  CHECK(dynamo_moe_bundle_describe(bundle.data(), bundle.size(), &json) == status);
  if (status != DYNAMO_MOE_OK) {
    CHECK(status == DYNAMO_MOE_INVALID_BUNDLE);
    CHECK(dynamo_moe_last_error()[0] != '\0');
    return;
  }
  CHECK(count > 0 && json[0] == '[');
  dynamo_moe_json_free(json);
  for (std::uint32_t index = 0; index < count; ++index) {
    UseProgram(bundle, index);
  }
}

// Puts the header's size and checksum right, of a file or of a program.
template <typename Header>
void RepairHeader(char* bytes, std::size_t size) {
  if (size < sizeof(Header)) {
    return;
  }
  const auto size64 = static_cast<std::uint64_t>(size);
  std::memcpy(bytes + offsetof(Header, size), &size64, sizeof(size64));
  const std::uint32_t checksum = dynamo_moe::ChecksumWithHole(
      reinterpret_cast<const unsigned char*>(bytes), size, format::kChecksumOffset);
  std::memcpy(bytes + format::kChecksumOffset, &checksum, sizeof(checksum));
}

void Repair(std::vector<char>* bundle) {
  format::FileHeader header;
  if (bundle->size() < sizeof(header)) {
    return;
  }
  std::memcpy(&header, bundle->data(), sizeof(header));
  for (std::uint32_t i = 0; i < header.programs && i < kMostRepaired; ++i) {
    format::DirectoryEntry entry;
    const std::size_t at = sizeof(header) + i * sizeof(entry);
    if (bundle->size() < at + sizeof(entry)) {
      break;
    }
    std::memcpy(&entry, bundle->data() + at, sizeof(entry));
    if (entry.offset <= bundle->size() && entry.size <= bundle->size() - entry.offset) {
      RepairHeader<format::ProgramHeader>(bundle->data() + entry.offset, entry.size);
    }
  }
  RepairHeader<format::FileHeader>(bundle->data(), bundle->size());
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* /*count*/, char*** /*arguments*/) {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr || dlsym(library, "standin_reset") == nullptr) {
    std::fputs("without the stand-in driver: nothing is launched\n", stderr);
    return 0;
  }
  const int device = Find<int (*)(int, int)>(library, "standin_add_device")(kDevice, 232448);
  // No content stands for any image.
  Find<int (*)(const char*, std::size_t)>(library, "standin_add_image")("", 0);
  void* const context = Find<void* (*)(int)>(library, "standin_create_context")(device);
  Find<void (*)(void*)>(library, "standin_set_context")(context);
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  // Blocks of exactly the input's size, so that reading beyond it is noticed. Without a repair,
  // next to no change would get past the checksums.
  std::vector<char> bundle(data, data + size);
  if (size == 0) {
    bundle.reserve(1);
  }
  Use(bundle);
  Repair(&bundle);
  Use(bundle);
  return 0;
}
