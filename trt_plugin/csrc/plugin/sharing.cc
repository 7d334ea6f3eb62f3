#include "plugin/sharing.h"

namespace dynamo_moe::plugin {
namespace {

thread_local std::shared_ptr<Sharing> current;

}  // namespace

void Sharing::Begin() { current = std::make_shared<Sharing>(); }

void Sharing::End() { current = nullptr; }

std::shared_ptr<Sharing> Sharing::Current() { return current; }

bool Sharing::Stores(const dynamo_moe_key& key, const std::shared_ptr<const void>& layer) {
  const std::scoped_lock lock(mutex_);
  std::weak_ptr<const void>& storing = layers_[{key.size, key.hash}];
  if (storing.expired()) {
    storing = layer;
  }
  return storing.lock() == layer;
}

}  // namespace dynamo_moe::plugin
