#include "onnxruntime/runtime.h"

#include <array>

namespace dynamo_moe::onnxruntime {
namespace {

constexpr std::size_t kMostInputs = 3;

Status MakeValue(const Call& call, const Matrix& matrix, Owned<OrtValue>* value) {
  const Api& api = call.api();
  const std::int64_t sizes[] = {matrix.rows, matrix.columns};
  OrtValue* made = nullptr;
  // The runtime writes to results alone.
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api, api.CreateTensorWithDataAsOrtValue(call.memory(), const_cast<void*>(matrix.data),
                                                   matrix.bytes(), sizes, 2, matrix.type, &made)));
  *value = {made, {api.ReleaseValue}};
  return {};
}

}  // namespace

Status Take(const Api& api, OrtStatus* status) {
  if (status == nullptr) {
    return {};
  }
  Status taken = InvalidArgument(api.GetErrorMessage(status));
  api.ReleaseStatus(status);
  return taken;
}

OrtStatus* Give(const Api& api, const Status& status) {
  if (status.ok()) {
    return nullptr;
  }
  return api.CreateStatus(status.code() == DYNAMO_MOE_INVALID_ARGUMENT ? kInvalidArgument : kFail,
                          status.message().c_str());
}

Status Call::Open() {
  Allocator* allocator = nullptr;
  DYNAMO_MOE_RETURN_IF_ERROR(
      Take(api_, api_.KernelContext_GetAllocator(context_, memory_, &allocator)));
  allocator_ = {allocator, {api_.ReleaseAllocator}};
  return {};
}

Status Op::Create(const Api& api, const OrtKernelInfo* info, const char* name, std::int32_t version,
                  std::initializer_list<std::pair<const char*, ElementType>> types,
                  std::initializer_list<OpAttribute> attributes, std::int32_t inputs) {
  std::vector<Owned<OrtOpAttr>> owned;
  std::vector<const OrtOpAttr*> given;
  for (const OpAttribute& attribute : attributes) {
    const void* const data = attribute.is_float ? static_cast<const void*>(&attribute.number)
                                                : static_cast<const void*>(&attribute.integer);
    OrtOpAttr* made = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(
        Take(api, api.CreateOpAttr(attribute.name, data, 1,
                                   attribute.is_float ? kFloatAttribute : kIntAttribute, &made)));
    owned.emplace_back(made, Release<OrtOpAttr>{api.ReleaseOpAttr});
    given.push_back(made);
  }
  std::vector<const char*> names;
  std::vector<ElementType> elements;
  for (const auto& [type_name, type] : types) {
    names.push_back(type_name);
    elements.push_back(type);
  }
  OrtOp* made = nullptr;
  const Status status =
      Take(api, api.CreateOp(info, name, "", version, names.data(), elements.data(),
                             static_cast<std::int32_t>(names.size()), given.data(),
                             static_cast<std::int32_t>(given.size()), inputs, 1, &made));
  if (!status.ok()) {
    return InvalidArgument("the runtime's operator ", name, ": ", status.message());
  }
  op_ = {made, {api.ReleaseOp}};
  return {};
}

Status Op::operator()(const Call& call, std::initializer_list<Matrix> inputs,
                      const Matrix& output) const {
  const Api& api = call.api();
  const Release<OrtValue> release = {api.ReleaseValue};
  std::array<Owned<OrtValue>, kMostInputs + 1> values = {
      Owned<OrtValue>(nullptr, release), Owned<OrtValue>(nullptr, release),
      Owned<OrtValue>(nullptr, release), Owned<OrtValue>(nullptr, release)};
  std::array<const OrtValue*, kMostInputs> given = {};
  std::size_t count = 0;
  for (const Matrix& input : inputs) {
    DYNAMO_MOE_RETURN_IF_ERROR(MakeValue(call, input, &values[count]));
    given[count] = values[count].get();
    ++count;
  }
  DYNAMO_MOE_RETURN_IF_ERROR(MakeValue(call, output, &values[count]));
  OrtValue* const result = values[count].get();  // NOLINT(misc-const-correctness): written to.
  return Take(api, api.InvokeOp(call.context(), op_.get(), given.data(),
                                static_cast<std::int32_t>(count), &result, 1));
}

}  // namespace dynamo_moe::onnxruntime
