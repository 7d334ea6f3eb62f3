// Objects that were read from bytes and are in use: equal bytes share one object.
#pragma once

#include <functional>
#include <iterator>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "status.h"

namespace dynamo_moe {

// T has bytes(), and Read(bytes), which copies them.
template <typename T>
class InUse {
 public:
  // Never destroyed: an object may be dropped after static objects are.
  static InUse& All() {
    static auto& all = *new InUse;
    return all;
  }

  // Finds the object of these bytes, or reads it.
  Status Open(std::string_view bytes, std::shared_ptr<T>* object) {
    const std::size_t key = std::hash<std::string_view>()(bytes);
    const std::scoped_lock lock(mutex_);
    const auto [begin, end] = objects_.equal_range(key);
    for (auto each = begin; each != end; ++each) {
      std::shared_ptr<T> found = each->second.lock();
      if (found != nullptr && found->bytes() == bytes) {
        *object = std::move(found);
        return {};
      }
    }
    // Objects that are not used keep their memory until their entries are erased.
    for (auto each = objects_.begin(); each != objects_.end();) {
      each = each->second.expired() ? objects_.erase(each) : std::next(each);
    }
    auto read = std::make_shared<T>();
    DYNAMO_MOE_RETURN_IF_ERROR(read->Read(bytes));
    objects_.emplace(key, read);
    *object = std::move(read);
    return {};
  }

 private:
  InUse() = default;

  std::mutex mutex_;
  std::unordered_multimap<std::size_t, std::weak_ptr<T>> objects_;
};

}  // namespace dynamo_moe
