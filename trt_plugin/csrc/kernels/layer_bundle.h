// A bundle as one node sees it: the layers that have the node's attributes.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "bundle/layer.h"
#include "kernels/bundle_file.h"
#include "kernels/kernels.h"
#include "node/inputs.h"
#include "status.h"

namespace dynamo_moe {

class LayerBundle {
 public:
  // Opens the bundle at a path or, if that is empty, the one that this thread's layers are given,
  // or else the environment's. One that has no such layer is an error.
  static Status Open(const std::string& path, const dynamo_moe_layer& attributes,
                     std::shared_ptr<const LayerBundle>* bundle);

  const BundleFile& file() const { return *file_; }

  // Whether it has kernels for a call's dtypes up to a position.
  bool Has(const NodeCall& call, std::int32_t position) const;
  // Takes a complete layer's kernels, for the architectures that are wanted.
  Status Take(const dynamo_moe_layer& layer, std::shared_ptr<const Kernels>* kernels) const;

  // With which inputs it has the layer, for messages.
  std::string KnownInputsText() const;
  // The names of the inputs that a node lacks, and that all its layers have.
  std::string MissingInputs(const NodeCall& call) const;

 private:
  LayerBundle() = default;

  std::shared_ptr<BundleFile> file_;
  dynamo_moe_layer attributes_ = {};
  // Of these architectures; empty: of all that the bundle has.
  Architectures architectures_;
};

}  // namespace dynamo_moe
