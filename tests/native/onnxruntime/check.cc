// Exercises the operators of the CUDA provider under sanitizers: threads, streams, caches of
// experts, failures.
//
// Arguments: bundles for sm_80 of one layer and of the same layer offloaded, and the sources of its
// w1 and w2. libcuda.so.1 is the stand-in.
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <thread>
#include <utility>
#include <vector>

#include "../standin_client.h"
#include "runtime.h"

extern "C" OrtStatus* RegisterCustomOps(OrtSessionOptions* options, const ort::ApiBase* base);

namespace {

// The layer: float16 tokens and experts, ids of 64 bits, weights in float32.
constexpr std::int64_t kExperts = 5;
constexpr std::int64_t kTopK = 2;
constexpr std::int64_t kWidth = 136;
constexpr std::int64_t kHidden = 72;
constexpr int kThreads = 6;

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
  CheckNothingIsLeft(cuda);
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
  AddImages(cuda, ProgramOf(Read(arguments[1])));
  AddImages(cuda, ProgramOf(Read(arguments[2])));
  CheckThreads(cuda, arguments[1], nullptr, false);
  CheckFailures(cuda, arguments[1]);
  for (const bool shared : {false, true}) {
    CheckThreads(cuda, arguments[2], arguments + 3, shared);
  }
  std::puts("ok");
  return 0;
}
