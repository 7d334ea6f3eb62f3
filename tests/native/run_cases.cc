// Runs layers through the launcher on this machine's first GPU and compares their results, without
// PyTorch, whose start takes minutes under compute-sanitizer.
//
// Arguments: a folder that tests/support/launcher_cases.py wrote; --unpoisoned leaves workspace and
// result as they were allocated. The folder's file "cases" has, separated by white space, for each
// case its program's file, T, the largest permitted error, the number of tensors, and for each
// tensor its name, offset and bytes in the file "tensors". The tensor y is what is expected, in
// bfloat16. Everything else on the device is as in dynamo_moe.h. A layer whose experts are
// offloaded has w1 and w2 in pinned host memory, and runs twice: the second time, experts are in
// its cache.

#include <dlfcn.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>
#include <vector>

#include "bundle/layer.h"
#include "dynamo_moe.h"

namespace {

using Address = std::uint64_t;

constexpr unsigned char kPoison = 0xFF;  // NaN as a float, -1 as an expert's number.
// In the order of dynamo_moe_tensors; the result comes last.
constexpr auto& kNames = dynamo_moe::format::kTensorNames;
constexpr std::size_t kResult = std::size(kNames) - 1;

[[noreturn]] void Fail(const std::string& what) {
  std::fprintf(stderr, "%s\n", what.c_str());
  std::exit(1);
}

void Check(int result, const char* call) {
  if (result != 0) {
    Fail(std::string(call) + " failed with " + std::to_string(result));
  }
}

void CheckLauncher(dynamo_moe_status status) {
  if (status != DYNAMO_MOE_OK) {
    Fail(dynamo_moe_last_error());
  }
}

// The driver's functions that the launcher does not need.
struct Driver {
  int (*init)(unsigned);
  int (*get_device)(int*, int);
  int (*retain_context)(void**, int);
  int (*set_context)(void*);
  int (*synchronize)();
  int (*allocate)(Address*, std::size_t);
  int (*release)(Address);
  int (*fill)(Address, unsigned char, std::size_t);
  int (*to_device)(Address, const void*, std::size_t);
  int (*to_host)(void*, Address, std::size_t);
  int (*allocate_host)(void**, std::size_t, unsigned);
  int (*release_host)(void*);
  int (*get_address)(Address*, void*, unsigned);

  Driver() {
    void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
      Fail(dlerror());
    }
    const auto find = [&](const char* name, auto* function) {
      void* const symbol = dlsym(library, name);
      if (symbol == nullptr) {
        Fail(std::string("libcuda.so.1 has no ") + name);
      }
      *function = reinterpret_cast<std::remove_pointer_t<decltype(function)>>(symbol);
    };
    find("cuInit", &init);
    find("cuDeviceGet", &get_device);
    find("cuDevicePrimaryCtxRetain", &retain_context);
    find("cuCtxSetCurrent", &set_context);
    find("cuCtxSynchronize", &synchronize);
    find("cuMemAlloc_v2", &allocate);
    find("cuMemFree_v2", &release);
    find("cuMemsetD8_v2", &fill);
    find("cuMemcpyHtoD_v2", &to_device);
    find("cuMemcpyDtoH_v2", &to_host);
    find("cuMemHostAlloc", &allocate_host);
    find("cuMemFreeHost", &release_host);
    find("cuMemHostGetDevicePointer_v2", &get_address);
  }
};

// Device memory of exactly this size, so that memcheck sees the first byte beyond it.
class Memory {
 public:
  Memory(const Driver& cuda, std::size_t size) : cuda_(cuda) {
    Check(cuda_.allocate(&address_, size == 0 ? 1 : size), "cuMemAlloc");
  }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  Memory(Memory&& other) noexcept
      : cuda_(other.cuda_), address_(std::exchange(other.address_, 0)) {}
  ~Memory() {
    if (address_ != 0) {
      cuda_.release(address_);
    }
  }

  [[nodiscard]] Address get() const { return address_; }
  [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(address_); }

 private:
  const Driver& cuda_;
  Address address_ = 0;
};

// Pinned host memory that the device reads.
class Pinned {
 public:
  Pinned(const Driver& cuda, const char* content, std::size_t size) : cuda_(cuda) {
    constexpr unsigned kMapped = 2;
    Check(cuda_.allocate_host(&memory_, size, kMapped), "cuMemHostAlloc");
    std::memcpy(memory_, content, size);
    Check(cuda_.get_address(&address_, memory_, 0), "cuMemHostGetDevicePointer");
  }
  Pinned(const Pinned&) = delete;
  Pinned& operator=(const Pinned&) = delete;
  Pinned(Pinned&& other) noexcept
      : cuda_(other.cuda_),
        memory_(std::exchange(other.memory_, nullptr)),
        address_(other.address_) {}
  ~Pinned() {
    if (memory_ != nullptr) {
      cuda_.release_host(memory_);
    }
  }

  [[nodiscard]] void* pointer() const { return reinterpret_cast<void*>(address_); }

 private:
  const Driver& cuda_;
  void* memory_ = nullptr;
  Address address_ = 0;
};

std::string Read(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    Fail("cannot read " + path);
  }
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

float FromBfloat16(std::uint16_t half) {
  const std::uint32_t bits = static_cast<std::uint32_t>(half) << 16;
  float value = 0;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

// The largest difference, relative to the root mean square of what is expected.
double Error(const std::vector<std::uint16_t>& actual, const std::vector<std::uint16_t>& expected) {
  double worst = 0;
  double squares = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    const double right = FromBfloat16(expected[i]);
    const double difference = std::abs(FromBfloat16(actual[i]) - right);
    if (std::isnan(difference)) {
      return difference;
    }
    worst = std::max(worst, difference);
    squares += right * right;
  }
  return worst / std::sqrt(squares / static_cast<double>(expected.size()));
}

// Runs the case that the file describes next; returns its error.
double Run(const Driver& cuda, const std::string& folder, std::ifstream& cases,
           const std::string& program_name, std::int64_t tokens, const std::string& data,
           bool poisoned) {
  const std::string bytes = Read(folder + "/" + program_name);
  dynamo_moe_program* program = nullptr;
  dynamo_moe_layer layer = {};
  CheckLauncher(dynamo_moe_program_open(bytes.data(), bytes.size(), &program));
  CheckLauncher(dynamo_moe_program_info(program, &layer));
  const bool offloaded = layer.resident_experts != 0;
  const void* pointers[std::size(kNames)] = {};
  std::vector<Memory> memory;
  std::vector<Pinned> pinned;
  std::vector<std::uint16_t> expected;
  int count = 0;
  cases >> count;
  for (; count > 0; --count) {
    std::string name;
    std::size_t offset = 0;
    std::size_t size = 0;
    cases >> name >> offset >> size;
    if (!cases || offset + size > data.size()) {
      Fail("the file of cases is damaged");
    }
    const auto* const kind = std::find(std::begin(kNames), std::end(kNames), name);
    if (kind == std::end(kNames)) {
      Fail("there is no tensor " + name);
    }
    const void*& pointer = pointers[kind - std::begin(kNames)];
    if (offloaded && (name == "w1" || name == "w2")) {
      pointer = pinned.emplace_back(cuda, data.data() + offset, size).pointer();
      continue;
    }
    const Memory& tensor = memory.emplace_back(cuda, size);
    pointer = tensor.pointer();
    if (name != kNames[kResult]) {
      Check(cuda.to_device(tensor.get(), data.data() + offset, size), "cuMemcpyHtoD");
      continue;
    }
    expected.resize(size / sizeof(std::uint16_t));
    std::memcpy(expected.data(), data.data() + offset, size);
    if (poisoned) {
      Check(cuda.fill(tensor.get(), kPoison, size), "cuMemsetD8");
    }
  }
  std::size_t workspace_size = 0;
  CheckLauncher(dynamo_moe_program_workspace(program, tokens, &workspace_size));
  const Memory workspace(cuda, workspace_size);
  if (poisoned) {
    Check(cuda.fill(workspace.get(), kPoison, workspace_size), "cuMemsetD8");
  }
  dynamo_moe_tensors tensors = {};
  static_assert(sizeof(tensors) == sizeof(pointers));
  std::memcpy(&tensors, pointers, sizeof(tensors));
  dynamo_moe_cache* cache = nullptr;
  if (offloaded) {
    CheckLauncher(dynamo_moe_cache_open(program, nullptr, nullptr, 0, &cache));
    for (int time = 0; time < 2; ++time) {
      CheckLauncher(dynamo_moe_cache_enqueue(cache, tokens, &tensors, workspace.pointer(),
                                             workspace_size, nullptr));
    }
  } else {
    CheckLauncher(dynamo_moe_program_enqueue(program, tokens, &tensors, workspace.pointer(),
                                             workspace_size, nullptr));
  }
  Check(cuda.synchronize(), "cuCtxSynchronize");
  std::vector<std::uint16_t> actual(expected.size());
  const auto result = reinterpret_cast<Address>(tensors.y);
  Check(cuda.to_host(actual.data(), result, actual.size() * sizeof(std::uint16_t)), "cuMemcpyDtoH");
  dynamo_moe_cache_close(cache);
  dynamo_moe_program_close(program);
  return Error(actual, expected);
}

}  // namespace

// Exported, because tests call it in a process whose driver is the stand-in.
extern "C" int main(int count, char** arguments) {
  if (count < 2) {
    Fail("needs the folder of the cases");
  }
  const std::string folder = arguments[1];
  const bool poisoned = count < 3 || std::string(arguments[2]) != "--unpoisoned";
  const Driver cuda;
  int device = 0;
  void* context = nullptr;
  Check(cuda.init(0), "cuInit");
  Check(cuda.get_device(&device, 0), "cuDeviceGet");
  Check(cuda.retain_context(&context, device), "cuDevicePrimaryCtxRetain");
  Check(cuda.set_context(context), "cuCtxSetCurrent");

  const std::string data = Read(folder + "/tensors");
  std::ifstream cases(folder + "/cases");
  std::string program;
  std::int64_t tokens = 0;
  double permitted = 0;
  int runs = 0;
  int wrong = 0;
  while (cases >> program >> tokens >> permitted) {
    const double error = Run(cuda, folder, cases, program, tokens, data, poisoned);
    ++runs;
    // NaN is not within any bound.
    if (!(error <= permitted)) {
      ++wrong;
      std::printf("%s, %lld tokens: error %g, permitted %g\n", program.c_str(),
                  static_cast<long long>(tokens), error, permitted);
    }
  }
  std::printf("%d forward passes, %d wrong\n", runs, wrong);
  return runs == 0 || wrong != 0 ? 1 : 0;
}
