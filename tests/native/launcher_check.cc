// Exercises the launcher under sanitizers: threads, contexts, caches of experts, failures.
//
// Arguments: bundles of one layer's program for sm_80, for sm_90, and for both; one of an offloaded
// layer for sm_80, and the sources of its w1 and w2. libcuda.so.1 is the stand-in.

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "dynamo_moe.h"
#include "standin_client.h"

namespace {

constexpr std::int64_t kTokens = 30;

struct Tensors {
  std::vector<char> bytes = std::vector<char>(1 << 20);

  dynamo_moe_tensors all() {
    auto* const at =
        reinterpret_cast<char*>((reinterpret_cast<std::uintptr_t>(bytes.data()) + 255) / 256 * 256);
    return {at, at, at, at, at, at, at, at, at, at, at, at, at, at, at, at, at};
  }
};

void Enqueue(dynamo_moe_program* program, Tensors* tensors, std::int64_t tokens,
             dynamo_moe_status expected) {
  const dynamo_moe_tensors all = tensors->all();
  const dynamo_moe_status status =
      dynamo_moe_program_enqueue(program, tokens, &all, all.y, tensors->bytes.size(), nullptr);
  CHECK(status == expected);
}

void CheckThreads(const Standin& cuda, const std::string& bytes, int second_device = 0) {
  constexpr int kThreads = 8;
  void* const contexts[2] = {cuda.create_context(0), cuda.create_context(second_device)};
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

void EnqueueCached(dynamo_moe_cache* cache, Tensors* tensors, std::int64_t tokens,
                   dynamo_moe_status expected, void* stream = nullptr) {
  const dynamo_moe_tensors all = tensors->all();
  const dynamo_moe_status status =
      dynamo_moe_cache_enqueue(cache, tokens, &all, all.y, tensors->bytes.size(), stream);
  CHECK(status == expected);
}

// Threads that share a cache on two streams, each with one of its own besides.
void CheckCaches(const Standin& cuda, const std::string& bytes, const char* w1, const char* w2) {
  constexpr int kThreads = 8;
  void* const context = cuda.create_context(0);
  void* const streams[2] = {cuda.create_stream(context), cuda.create_stream(context)};
  dynamo_moe_program* program = nullptr;
  dynamo_moe_cache* shared = nullptr;
  CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &program) == DYNAMO_MOE_OK);
  CHECK(dynamo_moe_cache_open(program, w1, w2, 1, &shared) == DYNAMO_MOE_OK);
  std::vector<std::thread> threads;
  threads.reserve(kThreads);
  std::atomic<int> ready{0};
  for (int number = 0; number < kThreads; ++number) {
    threads.emplace_back([&, number] {
      Tensors tensors;
      cuda.set_context(context);
      for (++ready; ready < kThreads;) {
        std::this_thread::yield();
      }
      for (int round = 0; round < 20; ++round) {
        dynamo_moe_cache* own = nullptr;
        const char* note = nullptr;
        CHECK(dynamo_moe_cache_open(program, w1, w2, 0, &own) == DYNAMO_MOE_OK);
        EnqueueCached(shared, &tensors, 1 + round, DYNAMO_MOE_OK, streams[number % 2]);
        EnqueueCached(own, &tensors, kTokens, DYNAMO_MOE_OK);
        EnqueueCached(own, &tensors, -1, DYNAMO_MOE_INVALID_ARGUMENT);
        CHECK(dynamo_moe_cache_note(shared, &note) == DYNAMO_MOE_OK);
        CHECK(note[0] == '\0');
        dynamo_moe_cache_close(own);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  // It outlives the program's handle.
  dynamo_moe_program_close(program);
  dynamo_moe_cache_close(shared);
  cuda.set_context(nullptr);
  CheckNothingIsLeft(cuda);
  CHECK(cuda.live_modules() == 0);
  cuda.destroy_context(context);
}

void CheckCachesThatFail(const Standin& cuda, const std::string& bytes, const char* w1,
                         const char* w2) {
  void* const context = cuda.create_context(0);
  cuda.set_context(context);
  Tensors tensors;
  dynamo_moe_program* program = nullptr;
  CHECK(dynamo_moe_program_open(bytes.data(), bytes.size(), &program) == DYNAMO_MOE_OK);
  for (const char* const function :
       {"cuMemAlloc", "cuStreamCreateWithPriority", "cuEventCreate", "cuMemsetD8Async",
        "cuStreamSynchronize", "cuStreamIsCapturing", "cuEventRecord", "cuStreamWaitEvent",
        "cuLaunchKernelEx"}) {
    dynamo_moe_cache* cache = nullptr;
    CHECK(dynamo_moe_cache_open(program, w1, w2, 0, &cache) == DYNAMO_MOE_OK);
    cuda.fail(function, 0, 719);
    EnqueueCached(cache, &tensors, kTokens, DYNAMO_MOE_CUDA_ERROR);
    EnqueueCached(cache, &tensors, kTokens, DYNAMO_MOE_OK);
    dynamo_moe_cache_close(cache);
    CheckNothingIsLeft(cuda);
  }
  for (const char* const function : {"cuMemHostRegister", "cuMemHostGetDevicePointer"}) {
    dynamo_moe_cache* cache = nullptr;
    const char* note = nullptr;
    CHECK(dynamo_moe_cache_open(program, w1, w2, 0, &cache) == DYNAMO_MOE_OK);
    cuda.fail(function, 0, 2);
    CHECK(dynamo_moe_cache_prepare(cache) == DYNAMO_MOE_OK);
    CHECK(dynamo_moe_cache_note(cache, &note) == DYNAMO_MOE_OK);
    CHECK(std::strstr(note, "copied to pinned memory") != nullptr);
    CHECK(cuda.live("pinned memory") == 1);
    dynamo_moe_cache_close(cache);
    CheckNothingIsLeft(cuda);
  }
  dynamo_moe_program_close(program);
  cuda.set_context(nullptr);
  cuda.destroy_context(context);
}

}  // namespace

int main(int count, char** paths) {
  CHECK(count == 7);
  const Standin cuda = LoadStandin();
  const int architectures[2] = {80, 90};
  for (int i = 0; i < 2; ++i) {
    const std::string bundle = Read(paths[1 + i]);
    const std::string program = ProgramOf(bundle);
    cuda.reset();
    cuda.add_device(architectures[i], 232448);
    AddImages(cuda, program);
    CheckThreads(cuda, program);
    CheckFailures(cuda, program);
  }
  const std::string both = Read(paths[3]);
  cuda.reset();
  for (std::uint32_t i = 0; i < 2; ++i) {
    cuda.add_device(architectures[i], 232448);
    AddImages(cuda, ProgramOf(both, i));
  }
  CheckThreads(cuda, both, 1);
  const std::string offloaded = ProgramOf(Read(paths[4]));
  cuda.reset();
  cuda.add_device(architectures[0], 232448);
  AddImages(cuda, offloaded);
  CheckCaches(cuda, offloaded, paths[5], paths[6]);
  CheckCachesThatFail(cuda, offloaded, paths[5], paths[6]);
  std::puts("ok");
  return 0;
}
