#include "plugin/log.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>

#include "plugin/tensorrt_abi.h"

namespace dynamo_moe::plugin {
namespace {

namespace v10 = tensorrt::v10;
namespace v11 = tensorrt::v11;

// The longest message that TensorRT permits, with the terminator.
constexpr std::size_t kMaxMessage = 1024;

// The TensorRT that has loaded us. The layout of loggers depends on its version. In version 10 none
// of their functions gives it, but the library that holds the finder's code does.
struct Host {
  void* finder = nullptr;
  int major = 0;
  void* (*get_logger)() = nullptr;
};

std::mutex mutex;
Host current;

const void* CodeOf(const void* object) { return *static_cast<const void* const*>(object); }

Host HostOf(void* finder) {
  Host host;
  Dl_info info = {};
  if (finder == nullptr || dladdr(CodeOf(finder), &info) == 0 || info.dli_fname == nullptr) {
    return host;
  }
  void* const library = dlopen(info.dli_fname, RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return host;
  }
  const auto version = reinterpret_cast<int (*)()>(dlsym(library, "getInferLibVersion"));
  if (version != nullptr) {
    // 101601 is 10.16.1.
    host = {finder, version() / 10000, reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"))};
  }
  dlclose(library);
  return host;
}

bool IsInterface(const v11::VersionedInterface& object, const char* kind) {
  const v11::InterfaceInfo info = object.getInterfaceInfo();
  return info.kind != nullptr && std::strcmp(info.kind, kind) == 0 && info.major == 1;
}

void* FindLogger(const Host& host) {
  void* logger = nullptr;
  if (host.major == 10) {
    logger = static_cast<v10::LoggerFinder*>(host.finder)->findLogger();
  } else if (host.major >= 11) {
    auto* const finder = static_cast<v11::LoggerFinder*>(host.finder);
    logger = IsInterface(*finder, "ILoggerFinder") ? finder->findLogger() : nullptr;
  }
  return logger == nullptr && host.get_logger != nullptr ? host.get_logger() : logger;
}

// Returns whether there was a logger of a known kind.
bool LogTo(const Host& host, tensorrt::Severity severity, const char* message) {
  void* logger = nullptr;
  try {
    logger = FindLogger(host);
  } catch (...) {
    return false;
  }
  if (logger == nullptr) {
    return false;
  }
  if (host.major == 10) {
    static_cast<v10::Logger*>(logger)->log(severity, message);
    return true;
  }
  if (host.major >= 11 && IsInterface(*static_cast<v11::Logger*>(logger), "ILogger")) {
    static_cast<v11::Logger*>(logger)->log(severity, message);
    return true;
  }
  return false;
}

}  // namespace

void SetLoggerFinder(void* finder) noexcept {
  const Host host = HostOf(finder);
  const std::scoped_lock lock(mutex);
  current = host;
}

void Log(tensorrt::Severity severity, const char* subject, const char* message) noexcept {
  char text[kMaxMessage];
  std::snprintf(text, sizeof(text), "%s: %s", subject, message);
  Host host;
  {
    const std::scoped_lock lock(mutex);
    host = current;
  }
  if (!LogTo(host, severity, text)) {
    std::fprintf(stderr, "[dynamo-moe] %s\n", text);
  }
}

Status FromLauncher(dynamo_moe_status code) {
  return code == DYNAMO_MOE_OK ? Status() : Status(code, dynamo_moe_last_error());
}

}  // namespace dynamo_moe::plugin
