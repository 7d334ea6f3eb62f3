// The one function of TensorRT's IPluginRegistry that we call, by its place in the table of virtual
// functions; abi_check.cc compares that with the SDK's.
#pragma once

#include <cstdint>

namespace dynamo_moe::plugin {

// TensorRT 11 left out four functions ahead of it.
constexpr int LoadLibrarySlot(std::int32_t major) { return major < 11 ? 10 : 6; }

// Has a registry load a library of plugins and register them.
//
// version is that of getInferLibVersion(), 101601 for 10.16.1. Returns the library's handle, null
// if TensorRT refuses it.
inline void* LoadLibrary(const void* registry, std::int32_t version, const char* path) {
  using Function = void* (*)(const void* registry, const char* path);
  void* const* const table = *static_cast<void* const* const*>(registry);
  return reinterpret_cast<Function>(table[LoadLibrarySlot(version / 10000)])(registry, path);
}

}  // namespace dynamo_moe::plugin
