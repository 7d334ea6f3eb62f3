#include "plugin/log.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <mutex>
#include <string_view>
#include <typeinfo>

#include "plugin/tensorrt_abi.h"

namespace dynamo_moe::plugin {
namespace {

namespace v10 = tensorrt::v10;
namespace v11 = tensorrt::v11;

// The longest message that TensorRT permits, with the terminator.
constexpr std::size_t kMaxMessage = 1024;

// The TensorRT that has loaded us.
struct Host {
  void* finder = nullptr;
  // Loggers are laid out as in TensorRT 11, as versioned interfaces.
  bool versioned = false;
  void* (*get_logger)() = nullptr;
};

std::mutex mutex;
Host current;

const void* CodeOf(const void* object) { return *static_cast<const void* const*>(object); }

// Whether an object's class has a base class IVersionedInterface. The version does not tell it:
// TensorRT for RTX 1.7 has loggers of TensorRT 11. A call would not do either: where the layout is
// another, it calls another function.
bool IsVersioned(const void* object) {
  const auto* const table = *static_cast<const std::type_info* const* const*>(object);
  // A class's description lies before its first function.
  const std::type_info* type = table[-1];
  while (type != nullptr) {
    const std::string_view name = type->name();
    constexpr std::string_view kBase = "19IVersionedInterfaceE";
    if (name.size() >= kBase.size() && name.substr(name.size() - kBase.size()) == kBase) {
      return true;
    }
    const auto* const derived = dynamic_cast<const abi::__si_class_type_info*>(type);
    type = derived == nullptr ? nullptr : derived->__base_type;
  }
  return false;
}

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
  if (dlsym(library, "getInferLibVersion") != nullptr) {
    host = {finder, IsVersioned(finder),
            reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"))};
  }
  dlclose(library);
  return host;
}

bool IsInterface(const v11::IVersionedInterface& object, const char* kind) {
  const v11::InterfaceInfo info = object.getInterfaceInfo();
  return info.kind != nullptr && std::strcmp(info.kind, kind) == 0 && info.major == 1;
}

void* FindLogger(const Host& host) {
  void* logger = nullptr;
  if (host.versioned) {
    auto* const finder = static_cast<v11::LoggerFinder*>(host.finder);
    logger = IsInterface(*finder, "ILoggerFinder") ? finder->findLogger() : nullptr;
  } else if (host.finder != nullptr) {
    logger = static_cast<v10::LoggerFinder*>(host.finder)->findLogger();
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
  if (!host.versioned) {
    static_cast<v10::Logger*>(logger)->log(severity, message);
    return true;
  }
  if (IsInterface(*static_cast<v11::Logger*>(logger), "ILogger")) {
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
