// Exercises the operators of the CUDA provider under sanitizers: threads, streams, caches of
// experts, failures.
//
// Arguments: bundles for sm_80 of one layer and of the same layer offloaded, and the sources of its
// w1 and w2. libcuda.so.1 is the stand-in.
#include <dlfcn.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "bundle/format.h"
#include "dynamo_moe.h"
#include "runtime.h"

#define CHECK(condition)                                           \
  do {                                                             \
    if (!(condition)) {                                            \
      std::fprintf(stderr, "line %d: %s\n", __LINE__, #condition); \
      std::exit(1);                                                \
    }                                                              \
  } while (false)

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const ort::ApiBase* base);

namespace {

// The layer: float16 tokens and experts, ids of 64 bits, weights in float32.
constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kWidth = 136;
constexpr std::int64_t kHidden = 72;
constexpr int kThreads = 6;

struct Standin {
  void (*reset)();
  int (*add_device)(int, int);
  int (*add_image)(const char*, std::size_t);
  void* (*create_context)(int);
  void (*destroy_context)(void*);
  void* (*create_stream)(void*);
  void (*set_context)(void*);
  void (*fail)(const char*, int, int);
  int (*live_modules)();
  int (*live)(const char*);
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
  Find(library, "standin_create_stream", &standin.create_stream);
  Find(library, "standin_set_context", &standin.set_context);
  Find(library, "standin_fail", &standin.fail);
  Find(library, "standin_live_modules", &standin.live_modules);
  Find(library, "standin_live", &standin.live);
  return standin;
}

// Tells the stand-in the images of a bundle's only program.
void AddImages(const Standin& cuda, const char* path) {
  namespace format = dynamo_moe::format;
  std::ifstream file(path, std::ios::binary);
  const std::string bundle{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  const void* program = nullptr;
  std::size_t size = 0;
  CHECK(dynamo_moe_bundle_program(bundle.data(), bundle.size(), 0, nullptr, nullptr, &program,
                                  &size) == DYNAMO_MOE_OK);
  const auto* const bytes = static_cast<const char*>(program);
  format::ProgramHeader header;
  std::memcpy(&header, bytes, sizeof(header));
  const format::Table& kernels = header.tables[format::kKernels];
  for (std::uint64_t i = 0; i < kernels.count; ++i) {
    format::Kernel kernel;
    std::memcpy(&kernel, bytes + kernels.offset + i * sizeof(kernel), sizeof(kernel));
    cuda.add_image(bytes + header.tables[format::kImages].offset + kernel.image_offset,
                   kernel.image_size);
  }
}

// The inputs of a call, or of a node: any number of tokens is -1.
class Inputs {
 public:
  Inputs(std::int64_t tokens, bool offloaded) {
    Add(ort::kFloat16Elements, {tokens, kWidth}, tokens >= 0);
    Add(ort::kInt64Elements, {tokens, kTopK}, tokens >= 0);
    Add(ort::kFloatElements, {tokens, kTopK}, tokens >= 0);
    Add(ort::kFloat16Elements, Weight(offloaded, {kExperts, kHidden, kWidth}), true);
    Add(ort::kFloat16Elements, Weight(offloaded, {kExperts, kWidth, kHidden}), true);
    Add(ort::kFloat16Elements, {kExperts, kHidden}, true);
    Add(ort::kFloat16Elements, {kExperts, kWidth}, true);
  }

  std::vector<Tensor> tensors() const {
    std::vector<Tensor> all;
    for (const Input& each : inputs_) {
      all.push_back({each.type, static_cast<std::int32_t>(each.sizes.size()), each.sizes.data(),
                     each.has_data ? Memory() : nullptr});
    }
    return all;
  }

  // Memory that nothing reads or writes: the stand-in's kernels do nothing.
  static void* Memory() {
    alignas(256) static char memory[256];
    return memory;
  }

 private:
  struct Input {
    std::int32_t type;
    std::vector<std::int64_t> sizes;
    bool has_data;
  };

  static std::vector<std::int64_t> Weight(bool offloaded, std::vector<std::int64_t> sizes) {
    return offloaded ? std::vector<std::int64_t>{1} : sizes;
  }

  void Add(std::int32_t type, std::vector<std::int64_t> sizes, bool has_data) {
    inputs_.push_back({type, std::move(sizes), has_data});
  }

  std::vector<Input> inputs_;
};

// The kernel of a node.
class Kernel {
 public:
  Kernel(OrtSessionOptions* options, const char* kernels, char** sources, bool shared)
      : offloaded_(sources != nullptr),
        op_(ort_operator(options, offloaded_ ? "moe.offloaded" : "moe", "DroplessMoEExperts",
                         "CUDAExecutionProvider", ort::kFloat16Elements)) {
    const Inputs inputs(-1, offloaded_);
    const std::vector<Tensor> tensors = inputs.tensors();
    OrtKernelInfo* const node = ort_node_new("layer", tensors.data(), tensors.size());
    ort_node_integer(node, "num_experts", kExperts);
    ort_node_integer(node, "top_k", kTopK);
    ort_node_integer(node, "in_features", kWidth);
    ort_node_integer(node, "hidden_features", kHidden);
    ort_node_text(node, "kernels", kernels);
    if (offloaded_) {
      ort_node_integer(node, "resident_experts", 2);
      ort_node_text(node, "w1_source", sources[0]);
      ort_node_text(node, "w2_source", sources[1]);
      ort_node_integer(node, "expert_cache", shared ? 1 : 0);
    }
    failure_ = ort_kernel_new(op_, node, &kernel_);
    ort_node_free(node);
  }
  Kernel(const Kernel&) = delete;
  Kernel& operator=(const Kernel&) = delete;
  ~Kernel() {
    if (failure_ == nullptr) {
      ort_kernel_free(op_, kernel_);
    }
  }

  const char* failure() const { return failure_; }

  const char* Call(std::int64_t tokens, void* stream) const {
    const Inputs inputs(tokens, offloaded_);
    const std::vector<Tensor> tensors = inputs.tensors();
    return ort_call(op_, kernel_, tensors.data(), tensors.size(), Inputs::Memory(), stream);
  }

 private:
  const bool offloaded_;
  const ort::CustomOp* op_;
  void* kernel_ = nullptr;
  const char* failure_ = nullptr;
};

// Threads on streams of their own, each with a kernel that all call and one that only it calls.
void CheckThreads(const Standin& cuda, const char* bundle, char** sources, bool shared) {
  void* const context = cuda.create_context(0);
  cuda.set_context(context);
  OrtSessionOptions* const options = ort_options_new();
  CHECK(ort_register(options, &RegisterCustomOps) == nullptr);
  {
    const Kernel common(options, bundle, sources, shared);
    CHECK(common.failure() == nullptr);
    std::vector<std::thread> threads;
    threads.reserve(kThreads);
    std::atomic<int> ready{0};
    for (int number = 0; number < kThreads; ++number) {
      void* const stream = cuda.create_stream(context);
      threads.emplace_back([&, number, stream] {
        cuda.set_context(number % 2 == 0 ? context : nullptr);
        for (++ready; ready < kThreads;) {
          std::this_thread::yield();
        }
        for (int round = 0; round < 10; ++round) {
          const Kernel own(options, bundle, sources, shared);
          CHECK(own.failure() == nullptr);
          CHECK(common.Call(3 * round, stream) == nullptr);
          CHECK(own.Call(30, stream) == nullptr);
          while (ort_message() != nullptr) {
          }
        }
      });
    }
    for (std::thread& thread : threads) {
      thread.join();
    }
  }
  ort_options_free(options);
  CHECK(ort_live() == 0);
  for (const char* const kind : {"memory", "registrations", "pinned memory", "streams", "events"}) {
    CHECK(cuda.live(kind) == 0);
  }
  CHECK(cuda.live_modules() == 0);
  cuda.set_context(nullptr);
  cuda.destroy_context(context);
}

void CheckFailures(const Standin& cuda, const char* bundle) {
  void* const context = cuda.create_context(0);
  cuda.set_context(context);
  OrtSessionOptions* const options = ort_options_new();
  CHECK(ort_register(options, &RegisterCustomOps) == nullptr);
  CHECK(Kernel(options, "/none.moek", nullptr, false).failure() != nullptr);
  for (const char* const function : {"cuDeviceGetAttribute", "cuModuleLoadData"}) {
    cuda.fail(function, 0, 719);
    CHECK(Kernel(options, bundle, nullptr, false).failure() != nullptr);
  }
  {
    const Kernel kernel(options, bundle, nullptr, false);
    CHECK(kernel.failure() == nullptr);
    cuda.fail("cuLaunchKernelEx", 0, 719);
    CHECK(kernel.Call(30, nullptr) != nullptr);
    for (const std::int32_t how : {1, 2}) {
      ort_fail_scratch(how);
      CHECK(kernel.Call(30, nullptr) != nullptr);
    }
    CHECK(kernel.Call(30, nullptr) == nullptr);
  }
  ort_options_free(options);
  CHECK(ort_live() == 0);
  CHECK(cuda.live_modules() == 0);
  cuda.set_context(nullptr);
  cuda.destroy_context(context);
}

}  // namespace

int main(int count, char** arguments) {
  CHECK(count == 5);
  const Standin cuda = LoadStandin();
  cuda.reset();
  cuda.add_device(80, 232448);
  AddImages(cuda, arguments[1]);
  AddImages(cuda, arguments[2]);
  CheckThreads(cuda, arguments[1], nullptr, false);
  CheckFailures(cuda, arguments[1]);
  for (const bool shared : {false, true}) {
    CheckThreads(cuda, arguments[2], arguments + 3, shared);
  }
  std::puts("ok");
  return 0;
}
