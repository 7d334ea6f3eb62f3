#include "plugin/log.h"

#include <cxxabi.h>
#include <dlfcn.h>

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <optional>
#include <string_view>
#include <typeinfo>
#include <vector>

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

// Whether a class is IVersionedInterface or derives from it.
bool IsVersioned(const std::type_info* type) {
  std::vector<const std::type_info*> types = {type};
  // Base classes are appended while it runs.
  for (std::size_t i = 0; i < types.size(); ++i) {
    const std::string_view name = types[i]->name();
    constexpr std::string_view kBase = "19IVersionedInterfaceE";
    if (name.size() >= kBase.size() && name.substr(name.size() - kBase.size()) == kBase) {
      return true;
    }
    if (const auto* const one = dynamic_cast<const abi::__si_class_type_info*>(types[i])) {
      types.push_back(one->__base_type);
    }
    if (const auto* const several = dynamic_cast<const abi::__vmi_class_type_info*>(types[i])) {
      for (unsigned base = 0; base < several->__base_count; ++base) {
        types.push_back(several->__base_info[base].__base_type);
      }
    }
  }
  return false;
}

// Whether a TensorRT's loggers are versioned interfaces; empty if that is unknown. The version does
// not always tell it: TensorRT for RTX 1.7 has loggers of TensorRT 11. A call would not do either:
// where the layout is another, it calls another function.
std::optional<bool> HasVersionedLoggers(const void* finder, std::int32_t version) {
  const auto* const table = *static_cast<const std::type_info* const* const*>(finder);
  // A class's description lies before its first function, unless it was compiled without.
  const auto* const type = dynamic_cast<const abi::__class_type_info*>(table[-1]);
  if (type != nullptr) {
    return IsVersioned(type);
  }
  const std::int32_t major = version / 10000;
  return major >= 10 ? std::optional<bool>(major >= 11) : std::nullopt;
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
  const auto version = reinterpret_cast<std::int32_t (*)()>(dlsym(library, "getInferLibVersion"));
  if (version != nullptr) {
    if (const auto versioned = HasVersionedLoggers(finder, version()); versioned.has_value()) {
      host = {finder, *versioned, reinterpret_cast<void* (*)()>(dlsym(library, "getLogger"))};
    }
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

}  // namespace dynamo_moe::plugin
