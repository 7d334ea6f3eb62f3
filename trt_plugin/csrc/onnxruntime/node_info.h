// What ONNX Runtime says of a node and of its tensors.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "node/attributes.h"
#include "onnxruntime/ort_abi.h"
#include "status.h"

namespace dynamo_moe::onnxruntime {

// A node's attributes while its kernel is made. One of another type counts as none.
class KernelAttributes final : public NodeAttributes {
 public:
  KernelAttributes(const Api& api, const OrtKernelInfo* info) : api_(api), info_(info) {}

  bool Integer(const char* name, std::int64_t* value) const override;
  bool Number(const char* name, float* value) const override;
  bool Text(const char* name, std::string* value) const override;

 private:
  const Api& api_;
  const OrtKernelInfo* info_;
};

// A node's name, for messages.
std::string NodeName(const Api& api, const OrtKernelInfo* info);

struct TensorType {
  ElementType type = kUndefined;
  // One that is not known yet is -1. An unknown number of dimensions looks like none.
  std::vector<std::int64_t> sizes;
};

// 0 for types that no kernel takes.
std::uint32_t DtypeCode(ElementType type);

Status TypeOf(const Api& api, const OrtValue* value, TensorType* type);

// The type of an input while the node's kernel is made, and whether there is such an input.
Status TypeOfInput(const Api& api, const OrtKernelInfo* info, std::size_t index, bool* found,
                   TensorType* type);

}  // namespace dynamo_moe::onnxruntime
