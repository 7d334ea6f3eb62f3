#include "launch/tensor_map.h"

#include <cstdint>
#include <string>

#include "bundle/layer.h"

namespace dynamo_moe {
namespace {

// A tensor's bytes, up to the end of its last element.
std::uint64_t Extent(const format::TensorMap& record) {
  std::uint64_t bytes = record.strides[0];
  for (std::uint32_t axis = 0; axis < record.rank; ++axis) {
    bytes += (record.sizes[axis] - 1) * record.strides[axis];
  }
  return bytes;
}

// Clears a bit that drivers up to 13.1 set in the maps of tensors below 128 KiB, whose tiles would
// otherwise load wrongly. CUTLASS and Triton 3.9 do the same.
Status CorrectSmallMap(const cuda::Driver& driver, const format::TensorMap& record,
                       cuda::TensorMap* map) {
  constexpr std::uint64_t kSmall = std::uint64_t{128} * 1024;
  constexpr std::uint64_t kMark = std::uint64_t{1} << 21;
  int version = 0;
  if (const cuda::Result result = driver.driver_get_version(&version); result != cuda::kSuccess) {
    return cuda::Failure(driver, result, "cuDriverGetVersion");
  }
  if (version <= cuda::kLastVersionMarkingSmallMaps && Extent(record) < kSmall) {
    map->opaque[1] &= ~kMark;
  }
  return {};
}

std::string NameOf(const Program& program, const format::TensorMap& record) {
  return record.kind == format::kTensor
             ? format::kTensorNames[record.index]
             : std::string(program.text(program.state()[record.index].name));
}

Status EncodeOne(const cuda::Driver& driver, const Program& program,
                 const format::TensorMap& record, const void* address, cuda::TensorMap* map) {
  if (driver.tensor_map_encode_tiled == nullptr) {
    return {DYNAMO_MOE_NO_DRIVER,
            "the CUDA driver is too old, it has no cuTensorMapEncodeTiled (525 or later has)"};
  }
  constexpr std::uint32_t kElementStrides[format::kMaxRank] = {1, 1, 1, 1, 1};
  // The driver takes no innermost stride: it is one element.
  const cuda::Result result = driver.tensor_map_encode_tiled(
      map, static_cast<int>(record.type), record.rank, const_cast<void*>(address), record.sizes,
      record.strides + 1, record.box, kElementStrides, /*interleave=*/0,
      static_cast<int>(record.swizzle), cuda::kL2Promotion128B, /*fill=*/0);
  if (result != cuda::kSuccess) {
    return cuda::Failure(
        driver, result,
        Text("tensor map of ", NameOf(program, record), ": cuTensorMapEncodeTiled"));
  }
  return CorrectSmallMap(driver, record, map);
}

}  // namespace

Status TensorMaps::Encode(const cuda::Driver& driver, std::size_t index, const void* address,
                          cuda::TensorMap* map) {
  const std::scoped_lock lock(encoding_);
  Encoded& encoded = encoded_[index];
  if (encoded.address != address) {
    // Encoding may fail.
    encoded.address = nullptr;
    DYNAMO_MOE_RETURN_IF_ERROR(
        EncodeOne(driver, program_, program_.tensor_maps()[index], address, &encoded.map));
    encoded.address = address;
  }
  *map = encoded.map;
  return {};
}

}  // namespace dynamo_moe
