// The C interface: no exception passes, and each failure's message is kept for its thread.
#include "dynamo_moe.h"

#include <cstring>
#include <memory>
#include <new>
#include <string_view>
#include <vector>

#include "bundle.h"
#include "launcher.h"

struct dynamo_moe_program {
  std::unique_ptr<dynamo_moe::Launcher> launcher;
};

namespace dynamo_moe {
namespace {

// Of fixed size, so that a message can be kept when memory is exhausted.
constexpr std::size_t kMaxMessage = 1024;
thread_local char last_error[kMaxMessage] = "";

dynamo_moe_status Keep(dynamo_moe_status status, const char* message) {
  std::strncpy(last_error, message, kMaxMessage - 1);
  return status;
}

template <typename Function>
dynamo_moe_status Guard(const Function& function) noexcept {
  try {
    const Status status = function();
    return status.ok() ? DYNAMO_MOE_OK : Keep(status.code(), status.message().c_str());
  } catch (const std::bad_alloc&) {
    return Keep(DYNAMO_MOE_OUT_OF_MEMORY, "the host's memory is exhausted");
  } catch (const std::exception& error) {
    return Keep(DYNAMO_MOE_INVALID_ARGUMENT, error.what());
  } catch (...) {
    return Keep(DYNAMO_MOE_INVALID_ARGUMENT, "unknown error");
  }
}

Status NotNull(const void* pointer, const char* name) {
  return pointer != nullptr ? Status() : InvalidArgument(name, " must not be null");
}

const char* ProgramAt(const void* bundle, const format::DirectoryEntry& entry) {
  return static_cast<const char*>(bundle) + entry.offset;
}

bool SameLayer(const dynamo_moe_layer& a, const dynamo_moe_layer& b) {
  // The format says so: its floats are written by one rule, and it has no padding.
  // NOLINTNEXTLINE(bugprone-suspicious-memory-comparison)
  return std::memcmp(&a, &b, sizeof(a)) == 0;
}

Status FindProgram(const void* bundle, std::size_t size, const dynamo_moe_layer& layer,
                   std::uint32_t architecture, const void** program, std::size_t* program_size) {
  std::vector<format::DirectoryEntry> entries;
  DYNAMO_MOE_RETURN_IF_ERROR(ReadDirectory(bundle, size, &entries));
  std::uint32_t best = 0;
  std::string others;
  for (const format::DirectoryEntry& entry : entries) {
    Program parsed;
    DYNAMO_MOE_RETURN_IF_ERROR(Program::Parse(ProgramAt(bundle, entry), entry.size, &parsed));
    if (!SameLayer(parsed.layer(), layer)) {
      continue;
    }
    if (RunsOn(parsed.architecture(), architecture) && parsed.architecture() > best) {
      best = parsed.architecture();
      *program = ProgramAt(bundle, entry);
      *program_size = entry.size;
    }
    others += Text(others.empty() ? "" : ", ", "sm_", parsed.architecture());
  }
  if (best != 0) {
    return {};
  }
  if (others.empty()) {
    return {DYNAMO_MOE_NOT_FOUND,
            Text("the bundle has ", entries.size(), " programs, none of this layer (",
                 layer.experts, " experts, top_k ", layer.top_k, ", width ", layer.width,
                 ", hidden ", layer.hidden, ")")};
  }
  return {DYNAMO_MOE_NOT_FOUND,
          Text("the bundle has this layer for ", others, ", the device is sm_", architecture)};
}

}  // namespace
}  // namespace dynamo_moe

using dynamo_moe::Guard;
using dynamo_moe::NotNull;
using dynamo_moe::Status;

const char* dynamo_moe_last_error(void) { return dynamo_moe::last_error; }

dynamo_moe_status dynamo_moe_bundle_count(const void* bundle, size_t size, uint32_t* count) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(count, "count"));
    std::vector<dynamo_moe::format::DirectoryEntry> entries;
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::ReadDirectory(bundle, size, &entries));
    for (const dynamo_moe::format::DirectoryEntry& entry : entries) {
      dynamo_moe::Program program;
      DYNAMO_MOE_RETURN_IF_ERROR(
          dynamo_moe::Program::Parse(dynamo_moe::ProgramAt(bundle, entry), entry.size, &program));
    }
    *count = static_cast<uint32_t>(entries.size());
    return {};
  });
}

dynamo_moe_status dynamo_moe_bundle_program(const void* bundle, size_t size, uint32_t index,
                                            dynamo_moe_layer* layer, uint32_t* architecture,
                                            const void** program, size_t* program_size) {
  return Guard([&]() -> Status {
    std::vector<dynamo_moe::format::DirectoryEntry> entries;
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::ReadDirectory(bundle, size, &entries));
    if (index >= entries.size()) {
      return dynamo_moe::InvalidArgument("index must be below the number of programs, ",
                                         entries.size(), ", got ", index);
    }
    const char* const data = dynamo_moe::ProgramAt(bundle, entries[index]);
    dynamo_moe::Program parsed;
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::Program::Parse(data, entries[index].size, &parsed));
    if (layer != nullptr) {
      *layer = parsed.layer();
    }
    if (architecture != nullptr) {
      *architecture = parsed.architecture();
    }
    if (program != nullptr) {
      *program = data;
    }
    if (program_size != nullptr) {
      *program_size = entries[index].size;
    }
    return {};
  });
}

dynamo_moe_status dynamo_moe_bundle_find(const void* bundle, size_t size,
                                         const dynamo_moe_layer* layer, uint32_t architecture,
                                         const void** program, size_t* program_size) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program_size, "program_size"));
    return dynamo_moe::FindProgram(bundle, size, *layer, architecture, program, program_size);
  });
}

dynamo_moe_status dynamo_moe_device_architecture(uint32_t* architecture) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(architecture, "architecture"));
    Status status;
    const dynamo_moe::cuda::Driver* const driver = dynamo_moe::cuda::Load(&status);
    return driver == nullptr ? status : dynamo_moe::CurrentArchitecture(*driver, architecture);
  });
}

dynamo_moe_status dynamo_moe_program_open(const void* data, size_t size,
                                          dynamo_moe_program** program) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    auto opened = std::make_unique<dynamo_moe_program>();
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::Launcher::Open(data, size, &opened->launcher));
    *program = opened.release();
    return {};
  });
}

// NOLINTNEXTLINE(misc-const-correctness): the interface closes what it gave away.
void dynamo_moe_program_close(dynamo_moe_program* program) { delete program; }

dynamo_moe_status dynamo_moe_program_info(const dynamo_moe_program* program,
                                          dynamo_moe_layer* layer, uint32_t* architecture) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    if (layer != nullptr) {
      *layer = program->launcher->program().layer();
    }
    if (architecture != nullptr) {
      *architecture = program->launcher->program().architecture();
    }
    return {};
  });
}

dynamo_moe_status dynamo_moe_program_bytes(const dynamo_moe_program* program, const void** data,
                                           size_t* size) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(data, "data"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(size, "size"));
    const std::string_view bytes = program->launcher->program().bytes();
    *data = bytes.data();
    *size = bytes.size();
    return {};
  });
}

dynamo_moe_status dynamo_moe_program_workspace(const dynamo_moe_program* program,
                                               int64_t max_tokens, size_t* bytes) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(bytes, "bytes"));
    return program->launcher->WorkspaceSize(max_tokens, bytes);
  });
}

dynamo_moe_status dynamo_moe_program_prepare(dynamo_moe_program* program) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    return program->launcher->Prepare();
  });
}

dynamo_moe_status dynamo_moe_program_enqueue(dynamo_moe_program* program, int64_t tokens,
                                             const dynamo_moe_tensors* tensors, void* workspace,
                                             size_t workspace_size, void* stream) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(tensors, "tensors"));
    return program->launcher->Enqueue(tokens, *tensors, workspace, workspace_size,
                                      static_cast<dynamo_moe::cuda::Stream>(stream));
  });
}
