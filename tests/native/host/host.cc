// Plays TensorRT: loads the plugin's library, finds creators, and calls plugins through both
// phases.
//
// One library of this source is one TensorRT: HOST_VERSION is what getInferLibVersion() returns,
// and loggers are laid out as that version has them. With HOST_SECOND_BASE its finder has two base
// classes. Tests call the functions below through ctypes.
#include <dlfcn.h>

#include <cstdint>
#include <cstring>
#include <deque>
#include <mutex>
#include <string>

#include "plugin/tensorrt_abi.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

namespace trt = nvinfer1;
using dynamo_moe::tensorrt::Severity;

#ifdef HOST_SECOND_BASE
struct Second {
  virtual ~Second() = default;
};
#define FINDER_BASES \
 public              \
  loggers::LoggerFinder, public Second
#else
#define FINDER_BASES \
 public              \
  loggers::LoggerFinder
#endif

std::mutex mutex;
std::deque<std::string> messages;
// Whether a caller of the plugin has a logger of its own, and whether TensorRT has one at all.
thread_local bool has_own_logger = true;
bool has_global_logger = true;

void Keep(const std::string& logger, Severity severity, const char* message) {
  const std::lock_guard<std::mutex> lock(mutex);
  messages.push_back(logger + " " + std::to_string(static_cast<int>(severity)) + " " + message);
}

// TensorRT for RTX 1.7 is 10701, with the loggers of TensorRT 11.
#if HOST_VERSION / 10000 == 10

namespace loggers = dynamo_moe::tensorrt::v10;

class Logger final : public loggers::Logger {
 public:
  explicit Logger(const char* name) : name_(name) {}
  void log(Severity severity, const char* message) noexcept override {
    Keep(name_, severity, message);
  }

 private:
  const char* name_;
};

class Finder final : FINDER_BASES {
 public:
  explicit Finder(Logger* own) : own_(own) {}
  loggers::Logger* findLogger() override { return has_own_logger ? own_ : nullptr; }

 private:
  Logger* own_;
};

#else

namespace loggers = dynamo_moe::tensorrt::v11;

class Logger final : public loggers::Logger {
 public:
  explicit Logger(const char* name) : name_(name) {}
  std::int32_t getAPILanguage() const noexcept override { return 0; }
  loggers::InterfaceInfo getInterfaceInfo() const noexcept override { return {"ILogger", 1, 0}; }
  void log(Severity severity, const char* message) noexcept override {
    Keep(name_, severity, message);
  }

 private:
  const char* name_;
};

class Finder final : FINDER_BASES {
 public:
  explicit Finder(Logger* own) : own_(own) {}
  std::int32_t getAPILanguage() const noexcept override { return 0; }
  loggers::InterfaceInfo getInterfaceInfo() const noexcept override {
    return {"ILoggerFinder", 1, 0};
  }
  loggers::Logger* findLogger() override { return has_own_logger ? own_ : nullptr; }

 private:
  Logger* own_;
};

#endif

Logger own_logger("own");
Logger global_logger("global");
Finder finder(&own_logger);

trt::IPluginCreatorInterface* const* creators = nullptr;
std::int32_t creator_count = 0;

template <typename Capability>
Capability& As(trt::IPluginV3* plugin, trt::PluginCapabilityType type) {
  return *static_cast<Capability*>(plugin->getCapabilityInterface(type));
}

trt::IPluginV3OneCore& Core(trt::IPluginV3* plugin) {
  return As<trt::IPluginV3OneCore>(plugin, trt::PluginCapabilityType::kCORE);
}

trt::IPluginV3OneBuild& Build(trt::IPluginV3* plugin) {
  return As<trt::IPluginV3OneBuild>(plugin, trt::PluginCapabilityType::kBUILD);
}

trt::IPluginV3OneRuntime& Runtime(trt::IPluginV3* plugin) {
  return As<trt::IPluginV3OneRuntime>(plugin, trt::PluginCapabilityType::kRUNTIME);
}

trt::IPluginCreatorV3One* CreatorOf(const char* name, const char* version) {
  for (std::int32_t i = 0; i < creator_count; ++i) {
    auto* const creator = static_cast<trt::IPluginCreatorV3One*>(creators[i]);
    const bool is_v3 =
        std::strcmp(creators[i]->getInterfaceInfo().kind, "PLUGIN CREATOR_V3ONE") == 0;
    if (is_v3 && std::strcmp(creator->getPluginName(), name) == 0 &&
        std::strcmp(creator->getPluginVersion(), version) == 0 &&
        std::strcmp(creator->getPluginNamespace(), "") == 0) {
      return creator;
    }
  }
  return nullptr;
}

void Write(const std::string& text, char* buffer, std::size_t size) {
  std::strncpy(buffer, text.c_str(), size - 1);
  buffer[size - 1] = '\0';
}

std::string KindOf(const trt::IVersionedInterface& interface) {
  const trt::InterfaceInfo info = interface.getInterfaceInfo();
  return std::string(info.kind) + " " + std::to_string(info.major) + "." +
         std::to_string(info.minor) + " " +
         std::to_string(static_cast<int>(interface.getAPILanguage()));
}

}  // namespace

// --- What TensorRT's library has ---

EXPORT std::int32_t getInferLibVersion() { return HOST_VERSION; }

EXPORT void* getLogger() { return has_global_logger ? &global_logger : nullptr; }

// --- The registry ---

// Returns null, or why the library is not one of plugins.
EXPORT const char* host_load(const char* path) {
  void* const library = dlopen(path, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    return dlerror();
  }
  const auto set_finder = reinterpret_cast<void (*)(void*)>(dlsym(library, "setLoggerFinder"));
  const auto get_creators =
      reinterpret_cast<trt::IPluginCreatorInterface* const* (*)(std::int32_t&)>(
          dlsym(library, "getCreators"));
  if (set_finder == nullptr || get_creators == nullptr) {
    return "no setLoggerFinder or getCreators";
  }
  set_finder(&finder);
  creators = get_creators(creator_count);
  return nullptr;
}

EXPORT void host_set_loggers(bool own, bool global) {
  has_own_logger = own;
  has_global_logger = global;
}

// The oldest message, "logger severity text"; returns whether there was one.
EXPORT bool host_message(char* buffer, std::size_t size) {
  const std::lock_guard<std::mutex> lock(mutex);
  if (messages.empty()) {
    return false;
  }
  Write(messages.front(), buffer, size);
  messages.pop_front();
  return true;
}

EXPORT std::int32_t host_creators() { return creator_count; }

EXPORT bool host_has(const char* name, const char* version) {
  return CreatorOf(name, version) != nullptr;
}

EXPORT const trt::PluginFieldCollection* host_field_names(const char* name, const char* version) {
  return CreatorOf(name, version)->getFieldNames();
}

EXPORT trt::IPluginV3* host_create(const char* name, const char* version, const char* layer,
                                   const trt::PluginFieldCollection* fields, std::int32_t phase) {
  return CreatorOf(name, version)
      ->createPlugin(layer, fields, static_cast<trt::TensorRTPhase>(phase));
}

// --- Plugins ---

EXPORT void host_destroy(trt::IPluginV3* plugin) { delete plugin; }

EXPORT trt::IPluginV3* host_clone(trt::IPluginV3* plugin) { return plugin->clone(); }

// Name, version, namespace, and what its interfaces say of themselves.
EXPORT void host_describe(trt::IPluginV3* plugin, char* buffer, std::size_t size) {
  trt::IPluginV3OneCore& core = Core(plugin);
  Write(std::string(core.getPluginName()) + "/" + core.getPluginVersion() + "/" +
            core.getPluginNamespace() + ": " + KindOf(*plugin) + ", " + KindOf(core) + ", " +
            KindOf(Build(plugin)) + ", " + KindOf(Runtime(plugin)),
        buffer, size);
}

EXPORT bool host_has_capability(trt::IPluginV3* plugin, std::int32_t type) {
  return plugin->getCapabilityInterface(static_cast<trt::PluginCapabilityType>(type)) != nullptr;
}

// --- The build phase ---

EXPORT std::int32_t host_outputs(trt::IPluginV3* plugin) { return Build(plugin).getNbOutputs(); }

EXPORT std::int32_t host_output_types(trt::IPluginV3* plugin, trt::DataType* output_types,
                                      std::int32_t outputs, const trt::DataType* input_types,
                                      std::int32_t inputs) {
  return Build(plugin).getOutputDataTypes(output_types, outputs, input_types, inputs);
}

// A symbol is any address, which the plugin may only hand on.
EXPORT std::int32_t host_output_shapes(trt::IPluginV3* plugin, const trt::DimsExprs* input_shapes,
                                       std::int32_t inputs, trt::DimsExprs* output_shapes,
                                       std::int32_t outputs) {
  auto* const builder = reinterpret_cast<trt::IExprBuilder*>(std::uintptr_t{16});
  return Build(plugin).getOutputShapes(input_shapes, inputs, nullptr, 0, output_shapes, outputs,
                                       *builder);
}

EXPORT bool host_supports(trt::IPluginV3* plugin, std::int32_t position,
                          const trt::DynamicPluginTensorDesc* in_out, std::int32_t inputs,
                          std::int32_t outputs) {
  return Build(plugin).supportsFormatCombination(position, in_out, inputs, outputs);
}

EXPORT std::int32_t host_configure(trt::IPluginV3* plugin, const trt::DynamicPluginTensorDesc* in,
                                   std::int32_t inputs, const trt::DynamicPluginTensorDesc* out,
                                   std::int32_t outputs) {
  return Build(plugin).configurePlugin(in, inputs, out, outputs);
}

EXPORT std::size_t host_workspace(trt::IPluginV3* plugin, const trt::DynamicPluginTensorDesc* in,
                                  std::int32_t inputs, const trt::DynamicPluginTensorDesc* out,
                                  std::int32_t outputs) {
  return Build(plugin).getWorkspaceSize(in, inputs, out, outputs);
}

EXPORT std::int32_t host_tactics(trt::IPluginV3* plugin) { return Build(plugin).getNbTactics(); }

EXPORT const char* host_timing_id(trt::IPluginV3* plugin) {
  return Build(plugin).getTimingCacheID();
}

EXPORT const char* host_metadata(trt::IPluginV3* plugin) {
  return Build(plugin).getMetadataString();
}

// --- The runtime phase ---

EXPORT const trt::PluginFieldCollection* host_serialize(trt::IPluginV3* plugin) {
  return Runtime(plugin).getFieldsToSerialize();
}

EXPORT trt::IPluginV3* host_attach(trt::IPluginV3* plugin) {
  // A context's resources, which the plugin leaves alone.
  auto* const context = reinterpret_cast<trt::IPluginResourceContext*>(std::uintptr_t{16});
  return Runtime(plugin).attachToContext(context);
}

EXPORT std::int32_t host_shape_change(trt::IPluginV3* plugin, const trt::PluginTensorDesc* in,
                                      std::int32_t inputs, const trt::PluginTensorDesc* out,
                                      std::int32_t outputs) {
  trt::IPluginV3OneRuntime& runtime = Runtime(plugin);
  const std::int32_t status = runtime.setTactic(0);
  return status != 0 ? status : runtime.onShapeChange(in, inputs, out, outputs);
}

EXPORT std::int32_t host_enqueue(trt::IPluginV3* plugin, const trt::PluginTensorDesc* in,
                                 const trt::PluginTensorDesc* out, const void* const* inputs,
                                 void* const* outputs, void* workspace, void* stream) {
  return Runtime(plugin).enqueue(in, out, inputs, outputs, workspace,
                                 static_cast<cudaStream_t>(stream));
}
