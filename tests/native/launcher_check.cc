// Exercises the launcher where sanitizers watch: damaged bundles, threads, contexts, failures.
//
// Arguments: bundles of one program each, for sm_80 and for sm_90. libcuda.so.1 is the stand-in.

#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <limits>
#include <string>
#include <thread>
#include <vector>

#include "../../trt_plugin/csrc/checksum.h"
#include "../../trt_plugin/csrc/dynamo_moe.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, \
                   dynamo_moe_last_error());                                      \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

namespace {

constexpr std::int64_t kTokens = 30;
constexpr std::size_t kChecksumOffset = 24;
#ifdef __SANITIZE_THREAD__
// Damage is one thread's business, and a minute's work under this sanitizer.
constexpr bool kWatchesThreads = true;
#else
constexpr bool kWatchesThreads = false;
#endif
constexpr std::size_t kKernelTable = 5;
constexpr std::size_t kStringTable = 8;
constexpr std::size_t kImageTable = 9;

struct Standin {
  void (*reset)();
  int (*add_device)(int, int);
  int (*add_image)(const char*, std::size_t);
  void* (*create_context)(int);
  void (*destroy_context)(void*);
  void (*set_context)(void*);
  void (*fail)(const char*, int, int);
  int (*live_modules)();
  int (*calls)(const char*);
};

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  CHECK(*function != nullptr);
}

Standin LoadStandin() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  Standin standin = {};
  Find(library, "standin_reset", &standin.reset);
  Find(library, "standin_add_device", &standin.add_device);
  Find(library, "standin_add_image", &standin.add_image);
  Find(library, "standin_create_context", &standin.create_context);
  Find(library, "standin_destroy_context", &standin.destroy_context);
  Find(library, "standin_set_context", &standin.set_context);
  Find(library, "standin_fail", &standin.fail);
  Find(library, "standin_live_modules", &standin.live_modules);
  Find(library, "standin_calls", &standin.calls);
  return standin;
}

std::string Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

std::string ProgramOf(const std::string& bundle) {
  const void* program = nullptr;
  std::size_t size = 0;
  CHECK(dynamo_moe_bundle_program(bundle.data(), bundle.size(), 0, nullptr, nullptr, &program,
                                  &size) == DYNAMO_MOE_OK);
  return {static_cast<const char*>(program), size};
}

void RepairChecksum(std::string* bytes, std::size_t begin, std::size_t size, std::size_t hole) {
  const auto* const data = reinterpret_cast<const unsigned char*>(bytes->data()) + begin;
  const std::uint32_t checksum = dynamo_moe::ChecksumWithHole(data, size, hole);
  std::memcpy(bytes->data() + begin + hole, &checksum, sizeof(checksum));
}

// A heap block of exactly the given size, so that reading beyond it is seen.
dynamo_moe_status Count(const std::string& bytes) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  std::uint32_t count = 0;
  return dynamo_moe_bundle_count(exact.data(), exact.size(), &count);
}

// Opens a program and, where that succeeds, launches it on the stand-in: nothing touches memory.
dynamo_moe_status OpenAndLaunch(const std::string& bytes) {
  const std::vector<char> exact(bytes.begin(), bytes.end());
  dynamo_moe_program* program = nullptr;
  const dynamo_moe_status status = dynamo_moe_program_open(exact.data(), exact.size(), &program);
  if (status == DYNAMO_MOE_OK) {
    std::size_t workspace = 0;
    void* const memory = reinterpret_cast<void*>(std::uintptr_t{1} << 40);
    const dynamo_moe_tensors tensors = {memory, memory, memory, memory, memory,
                                        memory, memory, memory, memory, memory};
    for (const std::int64_t tokens :
         {std::int64_t{1}, kTokens, std::int64_t{50}, std::int64_t{1} << 62}) {
      // Any answer will do, without a fault.
      static_cast<void>(dynamo_moe_program_workspace(program, tokens, &workspace));
      static_cast<void>(dynamo_moe_program_enqueue(program, tokens, &tensors, memory,
                                                   std::size_t{1} << 62, nullptr));
    }
    dynamo_moe_program_close(program);
  }
  return status;
}

void CheckDamaged(const std::string& bundle) {
  for (std::size_t size = 1; size < bundle.size(); ++size) {
    CHECK(Count(bundle.substr(0, size)) == DYNAMO_MOE_INVALID_BUNDLE);
    CHECK(dynamo_moe_last_error()[0] != '\0');
  }
  CHECK(Count(bundle + "x") == DYNAMO_MOE_INVALID_BUNDLE);
  const std::string program = ProgramOf(bundle);
  int refused = 0;
  for (std::size_t at = 0; at < program.size(); ++at) {
    std::string damaged = program;
    damaged[at] = static_cast<char>(damaged[at] ^ (1U << (at % 8)));
    CHECK(OpenAndLaunch(damaged) == DYNAMO_MOE_INVALID_BUNDLE);
    RepairChecksum(&damaged, 0, damaged.size(), kChecksumOffset);
    refused += OpenAndLaunch(damaged) == DYNAMO_MOE_INVALID_BUNDLE ? 1 : 0;
  }
  CHECK(refused > 0);
  for (std::size_t at = 0; at < 64; ++at) {
    std::string damaged = bundle;
    damaged[at] = static_cast<char>(damaged[at] ^ 0x80);
    RepairChecksum(&damaged, 0, damaged.size(), kChecksumOffset);
    const dynamo_moe_status status = Count(damaged);
    CHECK(status == DYNAMO_MOE_INVALID_BUNDLE || (at >= 24 && at < 28));
  }
}

// Where a program's table lies, and how many records it has.
struct Table {
  std::uint64_t offset;
  std::uint64_t count;
};

Table TableOf(const std::string& program, std::size_t index) {
  constexpr std::size_t kTables = 96;
  Table table = {};
  std::memcpy(&table, program.data() + kTables + index * sizeof(table), sizeof(table));
  return table;
}

// Numbers that break arithmetic on counts, offsets and indices, in every field.
template <typename Field>
void CheckStrange(const std::string& program) {
  constexpr Field kMost = std::numeric_limits<Field>::max();
  const std::size_t end = TableOf(program, kStringTable).offset;
  for (std::size_t at = 0; at + sizeof(Field) <= end; at += sizeof(Field)) {
    for (const Field value : {Field{0}, Field{1}, Field{7}, Field{kMost / 2}, Field{kMost / 2 + 1},
                              Field{kMost - 63}, kMost}) {
      std::string strange = program;
      std::memcpy(strange.data() + at, &value, sizeof(value));
      RepairChecksum(&strange, 0, strange.size(), kChecksumOffset);
      const dynamo_moe_status status = OpenAndLaunch(strange);
      CHECK(status == DYNAMO_MOE_OK || status == DYNAMO_MOE_INVALID_BUNDLE);
    }
  }
}

// Has the stand-in take any image, and launches what is taken of damaged programs.
void CheckDamagedAndStrange(const Standin& cuda, const std::string& bundle) {
  cuda.add_image("", 0);
  void* const context = cuda.create_context(0);
  cuda.set_context(context);
  CheckDamaged(bundle);
  const std::string program = ProgramOf(bundle);
  CheckStrange<std::uint32_t>(program);
  CheckStrange<std::uint64_t>(program);
  CHECK(cuda.live_modules() == 0);
  CHECK(cuda.calls("cuLaunchKernelEx") > 0);
  cuda.set_context(nullptr);
  cuda.destroy_context(context);
}

struct Tensors {
  std::vector<char> bytes = std::vector<char>(1 << 20);

  dynamo_moe_tensors all() {
    auto* const at =
        reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(bytes.data()) + 255) / 256 * 256);
    return {at, at, at, at, at, at, at, at, at, at};
  }
};

void Enqueue(dynamo_moe_program* program, Tensors* tensors, std::int64_t tokens,
             dynamo_moe_status expected) {
  const dynamo_moe_tensors all = tensors->all();
  const dynamo_moe_status status =
      dynamo_moe_program_enqueue(program, tokens, &all, all.y, tensors->bytes.size(), nullptr);
  CHECK(status == expected);
}

void CheckThreads(const Standin& cuda, const std::string& bytes) {
  constexpr int kThreads = 8;
  void* const contexts[2] = {cuda.create_context(0), cuda.create_context(0)};
  dynamo_moe_program* shared = nullptr;
  CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &shared) == DYNAMO_MOE_OK);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::atomic<int> ready{0};
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      Tensors tensors;
      cuda.set_context(contexts[number % 2]);
      for (++ready; ready < kThreads;) {
        std::this_thread::yield();
      }
      for (int round = 0; round < 50; ++round) {
        dynamo_moe_program* own = nullptr;
        CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &own) == DYNAMO_MOE_OK);
        Enqueue(shared, &tensors, 1 + round, DYNAMO_MOE_OK);
        Enqueue(own, &tensors, kTokens, DYNAMO_MOE_OK);
        Enqueue(own, &tensors, -1, DYNAMO_MOE_INVALID_ARGUMENT);
        dynamo_moe_program_close(own);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  dynamo_moe_program_close(shared);
  CHECK(cuda.live_modules() == 0);
  cuda.set_context(nullptr);
  cuda.destroy_context(contexts[0]);
  cuda.destroy_context(contexts[1]);
}

void CheckFailures(const Standin& cuda, const std::string& bytes) {
  void* const context = cuda.create_context(0);
  cuda.set_context(context);
  Tensors tensors;
  for (const char* const function :
       {"cuCtxGetCurrent", "cuCtxGetId", "cuCtxGetDevice", "cuDeviceGetAttribute",
        "cuModuleLoadData", "cuModuleGetFunction", "cuLaunchKernelEx"}) {
    dynamo_moe_program* program = nullptr;
    CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &program) == DYNAMO_MOE_OK);
    cuda.fail(function, 0, 719);
    Enqueue(program, &tensors, kTokens, DYNAMO_MOE_CUDA_ERROR);
    Enqueue(program, &tensors, kTokens, DYNAMO_MOE_OK);
    dynamo_moe_program_close(program);
    CHECK(cuda.live_modules() == 0);
  }
  cuda.set_context(nullptr);
  cuda.destroy_context(context);
}

// The images of a program's kernels, which the stand-in must know: found by the program's table.
void AddImages(const Standin& cuda, const std::string& program) {
  constexpr std::size_t kKernelSize = 56;
  constexpr std::size_t kImageField = 16;
  const Table kernels = TableOf(program, kKernelTable);
  const Table images = TableOf(program, kImageTable);
  for (std::uint64_t i = 0; i < kernels.count; ++i) {
    std::uint64_t image[2];
    std::memcpy(image, program.data() + kernels.offset + i * kKernelSize + kImageField,
                sizeof(image));
    cuda.add_image(program.data() + images.offset + image[0], image[1]);
  }
}

}  // namespace

int main(int count, char** paths) {
  CHECK(count == 3);
  const Standin cuda = LoadStandin();
  const int architectures[2] = {80, 90};
  for (int i = 0; i < 2; ++i) {
    const std::string bundle = Read(paths[1 + i]);
    const std::string program = ProgramOf(bundle);
    cuda.reset();
    cuda.add_device(architectures[i], 232448);
    if (!kWatchesThreads) {
      CheckDamagedAndStrange(cuda, bundle);
    }
    cuda.reset();
    cuda.add_device(architectures[i], 232448);
    AddImages(cuda, program);
    CheckThreads(cuda, program);
    CheckFailures(cuda, program);
  }
  std::puts("ok");
  return 0;
}
