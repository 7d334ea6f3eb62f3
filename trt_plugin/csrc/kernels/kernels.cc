#include "kernels/kernels.h"

#include <limits>
#include <utility>

#include "bundle/bundle.h"
#include "bundle/format.h"

namespace dynamo_moe {
namespace {

// A failed call of the launcher, with its message.
Status FromLauncher(dynamo_moe_status code) {
  return code == DYNAMO_MOE_OK ? Status() : Status(code, dynamo_moe_last_error());
}

}  // namespace

Status Kernels::Open(std::string_view bundle, std::shared_ptr<const Kernels>* kernels) {
  if (!IsBundle(bundle)) {
    return {DYNAMO_MOE_INVALID_BUNDLE, "not a kernel bundle: its first bytes differ"};
  }
  // make_shared needs a public constructor.
  std::shared_ptr<Kernels> opened(new Kernels());
  DYNAMO_MOE_RETURN_IF_ERROR(
      FromLauncher(dynamo_moe_program_open(bundle.data(), bundle.size(), &opened->program_)));
  DYNAMO_MOE_RETURN_IF_ERROR(opened->Describe());
  *kernels = std::move(opened);
  return {};
}

Status Kernels::Find(const dynamo_moe_key& key, std::shared_ptr<const Kernels>* kernels) {
  std::shared_ptr<Kernels> opened(new Kernels());
  const dynamo_moe_status found = dynamo_moe_program_find(&key, &opened->program_);
  if (found == DYNAMO_MOE_NOT_FOUND) {
    *kernels = nullptr;
    return {};
  }
  DYNAMO_MOE_RETURN_IF_ERROR(FromLauncher(found));
  DYNAMO_MOE_RETURN_IF_ERROR(opened->Describe());
  *kernels = std::move(opened);
  return {};
}

Status Kernels::Describe() {
  const void* bytes = nullptr;
  std::size_t size = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(FromLauncher(dynamo_moe_program_bytes(program_, &bytes, &size)));
  bytes_ = {static_cast<const char*>(bytes), size};
  DYNAMO_MOE_RETURN_IF_ERROR(FromLauncher(dynamo_moe_program_key(program_, &key_)));
  return FromLauncher(dynamo_moe_program_info(program_, &layer_));
}

Status Kernels::Prepare() const { return FromLauncher(dynamo_moe_program_prepare(program_)); }

Status Kernels::WorkspaceSize(std::int64_t most_tokens, std::size_t* bytes) const {
  DYNAMO_MOE_RETURN_IF_ERROR(
      FromLauncher(dynamo_moe_program_workspace(program_, most_tokens, bytes)));
  // Room to align it.
  *bytes += *bytes == 0 ? 0 : format::kWorkspaceAlignment - 1;
  return {};
}

Status Kernels::Enqueue(std::int64_t tokens, const dynamo_moe_tensors& tensors, void* workspace,
                        void* stream, Cache* cache) const {
  const auto address = reinterpret_cast<std::uintptr_t>(workspace);
  // Null stays null.
  void* const aligned = static_cast<char*>(workspace) + (-address % format::kWorkspaceAlignment);
  // It has the size that was asked for.
  constexpr std::size_t kEnough = std::numeric_limits<std::size_t>::max();
  return FromLauncher(
      cache == nullptr
          ? dynamo_moe_program_enqueue(program_, tokens, &tensors, aligned, kEnough, stream)
          : dynamo_moe_cache_enqueue(cache->get(), tokens, &tensors, aligned, kEnough, stream));
}

Status Cache::Open(const Kernels& kernels, const Offload& offload, std::shared_ptr<Cache>* cache) {
  std::shared_ptr<Cache> opened(new Cache());
  DYNAMO_MOE_RETURN_IF_ERROR(FromLauncher(
      dynamo_moe_cache_open(kernels.program(), offload.w1_source.c_str(), offload.w2_source.c_str(),
                            offload.shared ? 1 : 0, &opened->cache_)));
  std::size_t bytes = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(FromLauncher(dynamo_moe_program_state(kernels.program(), &bytes)));
  const dynamo_moe_layer& layer = kernels.layer();
  opened->summary_ = Text(layer.resident_experts, " of ", layer.experts,
                          " experts at a time are on the device, in ", bytes, " bytes ");
  opened->shared_ = offload.shared;
  *cache = std::move(opened);
  return {};
}

Status Cache::Prepare() const { return FromLauncher(dynamo_moe_cache_prepare(cache_)); }

std::string Cache::TakeSummary(const char* user) {
  if (summary_taken_.exchange(true)) {
    return "";
  }
  return shared_ ? Text(summary_, "that all ", user, "s share") : Text(summary_, "for each ", user);
}

std::string Cache::TakeWarning() {
  const char* note = "";
  static_cast<void>(dynamo_moe_cache_note(cache_, &note));
  return *note == '\0' || warning_taken_.exchange(true) ? "" : note;
}

}  // namespace dynamo_moe
