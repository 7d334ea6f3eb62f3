// The C interface: no exception leaves it, and each thread keeps its last failure's message.
#include "dynamo_moe.h"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "bundle/bundle.h"
#include "bundle/description.h"
#include "bundle/expression.h"
#include "bundle/layer.h"
#include "guard.h"
#include "launch/launcher.h"

struct dynamo_moe_program {
  std::shared_ptr<dynamo_moe::LayerLauncher> launcher;
};

struct dynamo_moe_cache {
  // Outlives what lies on the device.
  std::shared_ptr<dynamo_moe::LayerLauncher> launcher;
  dynamo_moe::ExpertCache experts;
};

namespace dynamo_moe {
namespace {

// The size is fixed, so that a message can be kept when memory is exhausted.
constexpr std::size_t kMaxMessage = 1024;
thread_local char last_error[kMaxMessage] = "";

// A copy for the caller, who frees it with dynamo_moe_json_free().
char* Copy(const std::string& text) {
  char* const copy = new char[text.size() + 1];
  std::copy_n(text.c_str(), text.size() + 1, copy);
  return copy;
}

}  // namespace

dynamo_moe_status Keep(dynamo_moe_status status, const char* message) {
  std::strncpy(last_error, message, kMaxMessage - 1);
  return status;
}

}  // namespace dynamo_moe

using dynamo_moe::Bundle;
using dynamo_moe::Guard;
using dynamo_moe::NotNull;
using dynamo_moe::Status;

const char* dynamo_moe_last_error(void) { return dynamo_moe::last_error; }

dynamo_moe_status dynamo_moe_bundle_count(const void* bundle, size_t size, uint32_t* count) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(count, "count"));
    Bundle opened;
    DYNAMO_MOE_RETURN_IF_ERROR(Bundle::Open(bundle, size, &opened));
    *count = static_cast<uint32_t>(opened.programs().size());
    return {};
  });
}

dynamo_moe_status dynamo_moe_bundle_program(const void* bundle, size_t size, uint32_t index,
                                            dynamo_moe_layer* layer, uint32_t* architecture,
                                            const void** program, size_t* program_size) {
  return Guard([&]() -> Status {
    Bundle opened;
    DYNAMO_MOE_RETURN_IF_ERROR(Bundle::Open(bundle, size, &opened));
    if (index >= opened.programs().size()) {
      return dynamo_moe::InvalidArgument("index must be below the number of programs, ",
                                         opened.programs().size(), ", got ", index);
    }
    const Bundle::Entry& entry = opened.programs()[index];
    if (layer != nullptr) {
      *layer = entry.layer;
    }
    if (architecture != nullptr) {
      *architecture = entry.architecture;
    }
    if (program != nullptr) {
      *program = entry.bytes.data();
    }
    if (program_size != nullptr) {
      *program_size = entry.bytes.size();
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
    Bundle opened;
    DYNAMO_MOE_RETURN_IF_ERROR(Bundle::Open(bundle, size, &opened));
    std::string_view found;
    DYNAMO_MOE_RETURN_IF_ERROR(opened.Find(*layer, architecture, &found));
    *program = found.data();
    *program_size = found.size();
    return {};
  });
}

dynamo_moe_status dynamo_moe_bundle_describe(const void* bundle, size_t size, char** json) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(json, "json"));
    Bundle opened;
    DYNAMO_MOE_RETURN_IF_ERROR(Bundle::Open(bundle, size, &opened));
    *json = dynamo_moe::Copy(dynamo_moe::DescribeBundle(opened));
    return {};
  });
}

dynamo_moe_status dynamo_moe_layer_describe(const dynamo_moe_layer* layer, char** json) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(json, "json"));
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::CheckLayer(*layer));
    *json = dynamo_moe::Copy(dynamo_moe::DescribeLayer(*layer));
    return {};
  });
}

// It frees what dynamo_moe_bundle_describe() gave.
// NOLINTNEXTLINE(misc-const-correctness,readability-non-const-parameter)
void dynamo_moe_json_free(char* json) { delete[] json; }

dynamo_moe_status dynamo_moe_expression_evaluate(const void* instructions, size_t count,
                                                 const int64_t* sizes, int64_t* value) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(instructions, "instructions"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(sizes, "sizes"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(value, "value"));
    namespace format = dynamo_moe::format;
    const dynamo_moe::Span<format::Instruction> given(
        static_cast<const format::Instruction*>(instructions), count);
    dynamo_moe::Sizes values = {};
    std::copy_n(sizes, static_cast<std::size_t>(format::kSymbols), values.values);
    if (const Status status = dynamo_moe::CheckExpression(given); !status.ok()) {
      return dynamo_moe::InvalidArgument("the expression ", status.message());
    }
    return dynamo_moe::Evaluate(given, values, value)
               ? Status()
               : dynamo_moe::InvalidArgument("the expression ", dynamo_moe::ExpressionText(given),
                                             " overflows 64 bits or divides by less than 1 for ",
                                             sizes[format::kTokens], " tokens");
  });
}

dynamo_moe_status dynamo_moe_program_open(const void* data, size_t size,
                                          dynamo_moe_program** program) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    auto opened = std::make_unique<dynamo_moe_program>();
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::LayerLauncher::Open(data, size, &opened->launcher));
    *program = opened.release();
    return {};
  });
}

dynamo_moe_status dynamo_moe_program_key(const dynamo_moe_program* program, dynamo_moe_key* key) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(key, "key"));
    const dynamo_moe::ContentKey content(program->launcher->bytes());
    *key = {content.size, content.hash};
    return {};
  });
}

dynamo_moe_status dynamo_moe_program_find(const dynamo_moe_key* key, dynamo_moe_program** program) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(key, "key"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    dynamo_moe::ContentKey content;
    content.size = key->size;
    content.hash = key->hash;
    auto opened = std::make_unique<dynamo_moe_program>();
    DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::LayerLauncher::Find(content, &opened->launcher));
    *program = opened.release();
    return {};
  });
}

// NOLINTNEXTLINE(misc-const-correctness): it closes what dynamo_moe_program_open() returned.
void dynamo_moe_program_close(dynamo_moe_program* program) { delete program; }

dynamo_moe_status dynamo_moe_program_info(const dynamo_moe_program* program,
                                          dynamo_moe_layer* layer) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(layer, "layer"));
    *layer = program->launcher->layer();
    return {};
  });
}

dynamo_moe_status dynamo_moe_program_bytes(const dynamo_moe_program* program, const void** data,
                                           size_t* size) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(data, "data"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(size, "size"));
    const std::string_view bytes = program->launcher->bytes();
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
    return program->launcher->Prepare(nullptr);
  });
}

dynamo_moe_status dynamo_moe_program_enqueue(dynamo_moe_program* program, int64_t tokens,
                                             const dynamo_moe_tensors* tensors, void* workspace,
                                             size_t workspace_size, void* stream) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(tensors, "tensors"));
    return program->launcher->Enqueue(tokens, *tensors, workspace, workspace_size,
                                      static_cast<dynamo_moe::cuda::Stream>(stream), nullptr);
  });
}

dynamo_moe_status dynamo_moe_program_state(const dynamo_moe_program* program, size_t* bytes) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(bytes, "bytes"));
    return program->launcher->StateSize(bytes);
  });
}

dynamo_moe_status dynamo_moe_cache_open(const dynamo_moe_program* program, const char* w1_source,
                                        const char* w2_source, int shared,
                                        dynamo_moe_cache** cache) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(program, "program"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(cache, "cache"));
    if ((w1_source == nullptr) != (w2_source == nullptr)) {
      return dynamo_moe::InvalidArgument("w1 and w2 must both have a source, or both none");
    }
    std::optional<dynamo_moe::ExpertSources> sources;
    if (w1_source != nullptr) {
      DYNAMO_MOE_RETURN_IF_ERROR(dynamo_moe::ExpertSources::Open(
          program->launcher->layer(), w1_source, w2_source, &sources.emplace()));
    }
    *cache = new dynamo_moe_cache{program->launcher, {std::move(sources), shared != 0}};
    return {};
  });
}

// NOLINTNEXTLINE(misc-const-correctness): it closes what dynamo_moe_cache_open() returned.
void dynamo_moe_cache_close(dynamo_moe_cache* cache) { delete cache; }

dynamo_moe_status dynamo_moe_cache_prepare(dynamo_moe_cache* cache) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(cache, "cache"));
    return cache->launcher->Prepare(&cache->experts);
  });
}

dynamo_moe_status dynamo_moe_cache_note(const dynamo_moe_cache* cache, const char** note) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(cache, "cache"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(note, "note"));
    *note = cache->experts.note();
    return {};
  });
}

dynamo_moe_status dynamo_moe_cache_enqueue(dynamo_moe_cache* cache, int64_t tokens,
                                           const dynamo_moe_tensors* tensors, void* workspace,
                                           size_t workspace_size, void* stream) {
  return Guard([&]() -> Status {
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(cache, "cache"));
    DYNAMO_MOE_RETURN_IF_ERROR(NotNull(tensors, "tensors"));
    return cache->launcher->Enqueue(tokens, *tensors, workspace, workspace_size,
                                    static_cast<dynamo_moe::cuda::Stream>(stream), &cache->experts);
  });
}
