// A library of its own, beside libdynamo_moe.so: when it is opened, it has TensorRT load that one.
//
// It is for programs that open the libraries of plugins and leave the rest to them, as the Triton
// Inference Server and Polygraphy do. libdynamo_moe.so itself cannot do it: TensorRT registers what
// a library has that it loads, and would then find the plugins there already.
#include <dlfcn.h>
#include <link.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>

#include "plugin/registry_abi.h"

namespace {

constexpr char kLibrary[] = "libdynamo_moe.so";
// What has a registry, by the names of its files without their versions.
constexpr const char* kRuntimes[] = {"libnvinfer.so.", "libnvinfer_lean.so.",
                                     "libnvinfer_dispatch.so."};
// What the loader is asked for in a process without them.
constexpr const char* kNewest[] = {"libnvinfer.so.11", "libnvinfer.so.10"};

void Say(const char* what, const char* path) {
  std::fprintf(stderr, "libdynamo_moe_self_registering.so: %s%s; no plugin is registered\n", what,
               path);
}

const char* NameOf(const char* path) {
  const char* const slash = std::strrchr(path, '/');
  return slash == nullptr ? path : slash + 1;
}

// Called for each library of the process until it returns other than 0.
// NOLINTNEXTLINE(misc-const-correctness): the C library declares it so.
int OpenRuntime(dl_phdr_info* library, std::size_t /*size*/, void* handle) {
  for (const char* const runtime : kRuntimes) {
    if (std::strncmp(NameOf(library->dlpi_name), runtime, std::strlen(runtime)) == 0) {
      *static_cast<void**>(handle) = dlopen(library->dlpi_name, RTLD_NOW | RTLD_NOLOAD);
      return 1;
    }
  }
  return 0;
}

void* TensorRT() {
  void* handle = nullptr;
  dl_iterate_phdr(&OpenRuntime, &handle);
  for (const char* const name : kNewest) {
    handle = handle == nullptr ? dlopen(name, RTLD_NOW) : handle;
  }
  return handle;
}

[[gnu::constructor]] void Register() {
  Dl_info own = {};
  char path[4096];
  if (dladdr(reinterpret_cast<void*>(&Register), &own) == 0 || own.dli_fname == nullptr) {
    Say("its own path is not known", "");
    return;
  }
  const auto folder = static_cast<int>(NameOf(own.dli_fname) - own.dli_fname);
  const int size = std::snprintf(path, sizeof(path), "%.*s%s", folder, own.dli_fname, kLibrary);
  if (size < 0 || static_cast<std::size_t>(size) >= sizeof(path)) {
    Say("its own path is too long: ", own.dli_fname);
    return;
  }
  void* const runtime = TensorRT();
  if (runtime == nullptr) {
    Say("TensorRT is neither in this process nor where the loader looks for libraries", "");
    return;
  }
  const auto version = reinterpret_cast<std::int32_t (*)()>(dlsym(runtime, "getInferLibVersion"));
  const auto registry = reinterpret_cast<void* (*)()>(dlsym(runtime, "getPluginRegistry"));
  if (version == nullptr || registry == nullptr) {
    Say("TensorRT has no registry", "");
    return;
  }
  if (dynamo_moe::plugin::LoadLibrary(registry(), version(), path) == nullptr) {
    Say("TensorRT does not load ", path);
  }
}

}  // namespace
