#include "kernels/layer_bundle.h"

#include <algorithm>
#include <string_view>
#include <utility>
#include <vector>

#include "bundle/bundle.h"
#include "node/attributes.h"

namespace dynamo_moe {

Status LayerBundle::Open(const std::string& path, const dynamo_moe_layer& attributes,
                         std::shared_ptr<const LayerBundle>* bundle) {
  std::shared_ptr<LayerBundle> opened(new LayerBundle());
  opened->attributes_ = attributes;
  opened->file_ = path.empty() ? BundleFile::Given() : nullptr;
  if (opened->file_ == nullptr) {
    DYNAMO_MOE_RETURN_IF_ERROR(BundleFile::Open(path, &opened->file_));
    DYNAMO_MOE_RETURN_IF_ERROR(ReadArchitectures(&opened->architectures_));
  }
  std::vector<std::string_view> programs;
  DYNAMO_MOE_RETURN_IF_ERROR(opened->file_->Select(
      opened->architectures_, [&](const auto& each) { return HasAttributes(each, attributes); },
      &programs));
  if (programs.empty()) {
    return {DYNAMO_MOE_NOT_FOUND,
            Text(opened->file_->path(), " has no kernels of this layer: ", Describe(attributes))};
  }
  *bundle = std::move(opened);
  return {};
}

bool LayerBundle::Has(const NodeCall& call, std::int32_t position) const {
  const auto& programs = file_->programs();
  return std::any_of(programs.begin(), programs.end(), [&](const auto& each) {
    return Matches(each.layer, attributes_, call, position);
  });
}

Status LayerBundle::Take(const dynamo_moe_layer& layer,
                         std::shared_ptr<const Kernels>* kernels) const {
  std::vector<std::string_view> programs;
  const auto select = [&](const dynamo_moe_layer& wanted) {
    return file_->Select(
        architectures_, [&](const auto& each) { return SameLayer(each, wanted); }, &programs);
  };
  DYNAMO_MOE_RETURN_IF_ERROR(select(layer));
  if (programs.empty() && layer.experts_dtype == format::kFloat32) {
    // A bundle with TF32 products only was compiled that way on purpose.
    dynamo_moe_layer fast = layer;
    fast.flags |= format::kHasTf32;
    DYNAMO_MOE_RETURN_IF_ERROR(select(fast));
  }
  if (programs.empty()) {
    return {DYNAMO_MOE_NOT_FOUND,
            Text("no kernels with ", InputsText(layer), "; ", KnownInputsText())};
  }
  return Kernels::Open(BundleOf(programs), kernels);
}

std::string LayerBundle::MissingInputs(const NodeCall& call) const {
  std::string names;
  const Span<format::Tensor> order = InputsOf(call.node);
  for (auto i = static_cast<std::size_t>(call.inputs); i < order.size(); ++i) {
    const auto& programs = file_->programs();
    const bool needed = std::all_of(programs.begin(), programs.end(), [&](const auto& each) {
      return !HasAttributes(each.layer, attributes_) ||
             DtypeIn(each.layer, order[i]) != format::kNone;
    });
    if (needed) {
      names += Text(names.empty() ? "" : ", ", NameOf(order[i]));
    }
  }
  return names;
}

std::string LayerBundle::KnownInputsText() const {
  std::vector<std::string> known;
  for (const auto& each : file_->programs()) {
    if (HasAttributes(each.layer, attributes_)) {
      std::string inputs = InputsText(each.layer);
      if (std::find(known.begin(), known.end(), inputs) == known.end()) {
        known.push_back(std::move(inputs));
      }
    }
  }
  std::string text = Text(file_->path(), " has this layer with ");
  for (std::size_t i = 0; i < known.size(); ++i) {
    text += Text(i == 0 ? "" : "; or ", known[i]);
  }
  return text;
}

}  // namespace dynamo_moe
