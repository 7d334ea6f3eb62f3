#include "onnxruntime/node_info.h"

#include <cstring>

#include "bundle/layer.h"
#include "onnxruntime/runtime.h"

namespace dynamo_moe::onnxruntime {
namespace {

Status Read(const Api& api, const OrtTensorTypeAndShapeInfo* info, TensorType* type) {
  std::size_t rank = 0;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorElementType(info, &type->type)));
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetDimensionsCount(info, &rank)));
  type->sizes.resize(rank);
  return Take(api, api.GetDimensions(info, type->sizes.data(), rank));
}

// Reads a text of a size that the runtime says first.
template <typename Function>
bool ReadText(const Api& api, const Function& read, std::string* text) {
  std::size_t size = 0;
  if (!Take(api, read(nullptr, &size)).ok()) {
    return false;
  }
  text->assign(size, '\0');
  if (size > 0 && !Take(api, read(text->data(), &size)).ok()) {
    text->clear();
  }
  text->resize(std::strlen(text->c_str()));
  return true;
}

}  // namespace

bool KernelAttributes::Integer(const char* name, std::int64_t* value) const {
  return Take(api_, api_.KernelInfoGetAttribute_int64(info_, name, value)).ok();
}

bool KernelAttributes::Number(const char* name, float* value) const {
  float number = 0;
  const bool found = Take(api_, api_.KernelInfoGetAttribute_float(info_, name, &number)).ok();
  *value = found ? number : *value;
  return found;
}

bool KernelAttributes::Text(const char* name, std::string* value) const {
  const auto read = [&](char* text, std::size_t* size) {
    return api_.KernelInfoGetAttribute_string(info_, name, text, size);
  };
  return ReadText(api_, read, value);
}

std::string NodeName(const Api& api, const OrtKernelInfo* info) {
  const auto read = [&](char* text, std::size_t* size) {
    return api.KernelInfo_GetNodeName(info, text, size);
  };
  std::string name;
  ReadText(api, read, &name);
  return Printable(name);
}

std::uint32_t DtypeCode(ElementType type) {
  switch (type) {
    case kFloatElements:
      return format::kFloat32;
    case kFloat16Elements:
      return format::kFloat16;
    case kBfloat16Elements:
      return format::kBfloat16;
    case kInt8Elements:
      return format::kI8;
    case kInt32Elements:
      return format::kI32;
    case kInt64Elements:
      return format::kI64;
    default:
      return format::kNone;
  }
}

Status TypeOf(const Api& api, const OrtValue* value, TensorType* type) {
  OrtTensorTypeAndShapeInfo* made = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.GetTensorTypeAndShape(value, &made)));
  const Owned<OrtTensorTypeAndShapeInfo> info(made, {api.ReleaseTensorTypeAndShapeInfo});
  return Read(api, made, type);
}

Status TypeOfInput(const Api& api, const OrtKernelInfo* info, std::size_t index, bool* found,
                   TensorType* type) {
  OrtTypeInfo* made = nullptr;
  const Status asked = Take(api, api.KernelInfo_GetInputTypeInfo(info, index, &made));
  const Owned<OrtTypeInfo> type_info(made, {api.ReleaseTypeInfo});
  // One with an empty name has no type.
  *found = asked.ok() && made != nullptr;
  if (!*found) {
    return {};
  }
  const OrtTensorTypeAndShapeInfo* shaped = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(Take(api, api.CastTypeInfoToTensorInfo(made, &shaped)));
  return shaped == nullptr ? Status() : Read(api, shaped, type);
}

}  // namespace dynamo_moe::onnxruntime
