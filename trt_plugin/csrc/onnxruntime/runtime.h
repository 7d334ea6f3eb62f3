// ONNX Runtime's objects as values that release themselves, and its own operators as functions.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <new>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "onnxruntime/ort_abi.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

// Takes a status of the runtime's; null is success.
Status Take(const Api& api, OrtStatus* status);
// Gives the runtime a status; null is success.
OrtStatus* Give(const Api& api, const Status& status);

// Runs a function that returns a Status; nothing that it throws leaves it.
template <typename Function>
Status Caught(const Function& function) noexcept {
  try {
    return function();
  } catch (const std::bad_alloc&) {
    return {DYNAMO_MOE_OUT_OF_MEMORY, "the host's memory is exhausted"};
  } catch (const std::exception& error) {
    return InvalidArgument(error.what());
  }
}

// Releases an object by an entry of the interface.
template <typename Object>
struct Release {
  void (*release)(Object*);
  void operator()(Object* object) const { release(object); }
};
template <typename Object>
using Owned = std::unique_ptr<Object, Release<Object>>;

// A call of an operator: what the runtime's own operators run in, and where memory comes from.
class Call {
 public:
  // The memory's description outlives the call.
  Call(const Api& api, OrtKernelContext* context, const OrtMemoryInfo* memory)
      : api_(api), context_(context), memory_(memory), allocator_(nullptr, {nullptr}) {}

  Status Open();

  const Api& api() const { return api_; }
  OrtKernelContext* context() const { return context_; }
  const OrtMemoryInfo* memory() const { return memory_; }
  Allocator* allocator() const { return allocator_.get(); }

  // Runs a function for each index, on the session's threads, in batches of equal numbers of
  // indices (0: one for each thread), and returns the first error.
  template <typename Function>
  Status ForEach(std::size_t total, std::size_t batches, const Function& function) const {
    struct Shared {
      const Function& function;
      std::atomic<bool> failed{false};
      std::mutex mutex;
      Status error;
    } shared{function, {}, {}, {}};
    const auto run = [](void* data, std::size_t index) {
      auto& all = *static_cast<Shared*>(data);
      if (all.failed.load(std::memory_order_relaxed)) {
        return;
      }
      Status status = Caught([&] { return all.function(index); });
      if (!status.ok()) {
        const std::scoped_lock lock(all.mutex);
        if (!all.failed.exchange(true)) {
          all.error = std::move(status);
        }
      }
    };
    if (total == 1) {
      run(&shared, 0);
    } else {
      DYNAMO_MOE_RETURN_IF_ERROR(
          Take(api_, api_.KernelContext_ParallelFor(context_, run, total, batches, &shared)));
    }
    return shared.error;
  }

 private:
  const Api& api_;
  OrtKernelContext* context_;
  const OrtMemoryInfo* memory_;
  Owned<Allocator> allocator_;
};

// Memory of the session's, uninitialised.
template <typename Element>
class Buffer {
  static_assert(std::is_trivial_v<Element>);

 public:
  Buffer() = default;
  ~Buffer() {
    if (data_ != nullptr) {
      allocator_->free(allocator_, data_);
    }
  }
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Once.
  Status Allocate(const Call& call, std::size_t count) {
    allocator_ = call.allocator();
    const std::size_t bytes = (count == 0 ? 1 : count) * sizeof(Element);
    data_ = static_cast<Element*>(allocator_->alloc(allocator_, bytes));
    return data_ != nullptr
               ? Status()
               : Status(DYNAMO_MOE_OUT_OF_MEMORY, Text("there are no ", bytes, " bytes of memory"));
  }

  Element* data() const { return data_; }

 private:
  Allocator* allocator_ = nullptr;
  Element* data_ = nullptr;
};

// A tensor of up to two dimensions over memory of someone else.
struct Matrix {
  const void* data;
  std::int64_t rows;
  std::int64_t columns;
  ElementType type = kFloatElements;

  std::size_t bytes() const {
    const std::size_t size = type == kFloatElements ? 4 : 2;
    return static_cast<std::size_t>(rows * columns) * size;
  }
};

// An attribute of one of the runtime's operators.
struct OpAttribute {
  const char* name;
  bool is_float;
  std::int64_t integer;
  float number;
};

// One of the runtime's own operators, made for a kernel.
class Op {
 public:
  Status Create(const Api& api, const OrtKernelInfo* info, const char* name, std::int32_t version,
                std::initializer_list<std::pair<const char*, ElementType>> types,
                std::initializer_list<OpAttribute> attributes, std::int32_t inputs);

  // The result has the memory that is given. Any thread may call it.
  Status operator()(const Call& call, std::initializer_list<Matrix> inputs,
                    const Matrix& output) const;

 private:
  Owned<OrtOp> op_{nullptr, {nullptr}};
};

}  // namespace dynamo_moe::onnxruntime
