// Layers of one network with equal kernels: its engine stores these once.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>

#include "dynamo_moe.h"

namespace dynamo_moe::plugin {

class Sharing {
 public:
  // Makes the layers that this thread creates from now on share, until End().
  static void Begin();
  static void End();
  // What this thread's layers share; null outside Begin() and End().
  static std::shared_ptr<Sharing> Current();

  // Whether a layer stores the kernels of a key. The first layer that asks does, so it is in the
  // engine; TensorRT asks several times for each layer, and each time the answer is the same.
  bool Stores(const dynamo_moe_key& key, const std::shared_ptr<const void>& layer);

 private:
  std::mutex mutex_;
  std::map<std::pair<std::uint64_t, std::uint64_t>, std::weak_ptr<const void>> layers_;
};

}  // namespace dynamo_moe::plugin
