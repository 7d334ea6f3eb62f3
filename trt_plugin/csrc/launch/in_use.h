// Objects that were read from bytes and are in use: equal bytes share one object.
#pragma once

#include <iterator>
#include <memory>
#include <mutex>
#include <string_view>
#include <unordered_map>
#include <utility>

#include "launch/content_key.h"
#include "status.h"

namespace dynamo_moe {

// T has bytes(), and Read(bytes, owner...), after which bytes() stay valid as long as T.
template <typename T>
class InUse {
 public:
  // Never destroyed: an object may be dropped after static objects are.
  static InUse& All() {
    static auto& all = *new InUse;
    return all;
  }

  // Finds the object of these bytes, or reads it.
  template <typename... Owner>
  Status Open(std::string_view bytes, std::shared_ptr<T>* object, const Owner&... owner) {
    const ContentKey key(bytes);
    const std::scoped_lock lock(mutex_);
    *object = FindWhere(key, [bytes](const T& each) { return each.bytes() == bytes; });
    if (*object != nullptr) {
      return {};
    }
    // Objects that are not used keep their memory until their entries are erased.
    for (auto each = objects_.begin(); each != objects_.end();) {
      each = each->second.expired() ? objects_.erase(each) : std::next(each);
    }
    auto read = std::make_shared<T>();
    DYNAMO_MOE_RETURN_IF_ERROR(read->Read(bytes, owner...));
    objects_.emplace(key.hash, read);
    *object = std::move(read);
    return {};
  }

  // The object whose bytes a key names; null if none is in use.
  std::shared_ptr<T> Find(const ContentKey& key) {
    const std::scoped_lock lock(mutex_);
    return FindWhere(key, [](const T&) { return true; });
  }

 private:
  InUse() = default;

  template <typename Condition>
  std::shared_ptr<T> FindWhere(const ContentKey& key, const Condition& condition) const {
    const auto [begin, end] = objects_.equal_range(key.hash);
    for (auto each = begin; each != end; ++each) {
      std::shared_ptr<T> found = each->second.lock();
      if (found != nullptr && found->bytes().size() == key.size && condition(*found)) {
        return found;
      }
    }
    return nullptr;
  }

  std::mutex mutex_;
  // By the hashes of their keys.
  std::unordered_multimap<std::uint64_t, std::weak_ptr<T>> objects_;
};

}  // namespace dynamo_moe
