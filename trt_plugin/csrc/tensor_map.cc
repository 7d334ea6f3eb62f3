#include "tensor_map.h"

#include <cstdint>
#include <string>

#include "rules.h"

namespace dynamo_moe {
namespace {

// Bytes of a CUtensorMapDataType's element; 0 where no kernel has such tensors.
std::uint64_t ElementSize(std::uint32_t type) {
  switch (type) {
    case format::kMapFloat16:
    case format::kMapBfloat16:
      return 2;
    case format::kMapFloat32:
      return 4;
    default:
      return 0;
  }
}

// Bytes that a CUtensorMapSwizzle other than 0 permutes: 32, 64 or 128.
std::uint64_t SwizzleSpan(std::uint32_t swizzle) { return std::uint64_t{16} << swizzle; }

Status CheckAxis(const format::TensorMap& record, std::uint32_t axis) {
  if (axis >= record.rank) {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("a size beyond the rank", record.sizes[axis]));
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("a stride beyond the rank", record.strides[axis]));
    return CheckZero("a box beyond the rank", record.box[axis]);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("size", record.sizes[axis], 1, format::kMaxSize));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("box", record.box[axis], 1, format::kMaxBox));
  if (axis == 0) {
    const std::uint64_t element = ElementSize(record.type);
    if (record.strides[axis] != element) {
      return InvalidBundle("stride must be an element's size, ", element, ", is ",
                           record.strides[axis]);
    }
    const std::uint64_t bytes = record.box[axis] * element;
    if (record.swizzle != 0 && bytes > SwizzleSpan(record.swizzle)) {
      return InvalidBundle("the box in bytes must be at most ", SwizzleSpan(record.swizzle),
                           ", the swizzle's span, is ", bytes);
    }
    return CheckMultiple("the box in bytes", bytes, format::kBoxAlignment);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckMultiple("stride", record.strides[axis], format::kBoxAlignment));
  return CheckIn("stride", record.strides[axis], format::kBoxAlignment, format::kMaxStride - 1);
}

// A tensor's bytes, up to the end of its last element.
std::uint64_t Extent(const format::TensorMap& record) {
  std::uint64_t bytes = record.strides[0];
  for (std::uint32_t axis = 0; axis < record.rank; ++axis) {
    bytes += (record.sizes[axis] - 1) * record.strides[axis];
  }
  return bytes;
}

// Takes back what drivers up to 13.1 set in the maps of tensors below 128 KiB, whose tiles would be
// loaded wrongly; CUTLASS and Triton 3.9 do the same.
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

}  // namespace

Status CheckTensorMap(const format::TensorMap& record) {
  DYNAMO_MOE_RETURN_IF_ERROR(CheckBelow("tensor", record.tensor, format::kTensors));
  if (ElementSize(record.type) == 0) {
    return InvalidBundle("type must be float16 (", format::kMapFloat16, "), float32 (",
                         format::kMapFloat32, ") or bfloat16 (", format::kMapBfloat16, "), is ",
                         record.type);
  }
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("rank", record.rank, 2, format::kMaxRank));
  DYNAMO_MOE_RETURN_IF_ERROR(CheckIn("swizzle", record.swizzle, 0, format::kMaxSwizzle));
  for (std::uint32_t axis = 0; axis < format::kMaxRank; ++axis) {
    if (const Status status = CheckAxis(record, axis); !status.ok()) {
      return InvalidBundle("dimension ", axis, ": ", status.message());
    }
  }
  for (const std::uint32_t reserved : record.reserved) {
    DYNAMO_MOE_RETURN_IF_ERROR(CheckZero("reserved", reserved));
  }
  return {};
}

Status EncodeTensorMap(const cuda::Driver& driver, const format::TensorMap& record,
                       const void* address, cuda::TensorMap* map) {
  if (driver.tensor_map_encode_tiled == nullptr) {
    return {DYNAMO_MOE_NO_DRIVER,
            "the CUDA driver is too old, it has no cuTensorMapEncodeTiled (525 or later has)"};
  }
  constexpr std::uint32_t kElementStrides[format::kMaxRank] = {1, 1, 1, 1, 1};
  // The driver is not told the innermost stride, an element.
  const cuda::Result result = driver.tensor_map_encode_tiled(
      map, static_cast<int>(record.type), record.rank, const_cast<void*>(address), record.sizes,
      record.strides + 1, record.box, kElementStrides, /*interleave=*/0,
      static_cast<int>(record.swizzle), cuda::kL2Promotion128B, /*fill=*/0);
  if (result != cuda::kSuccess) {
    return cuda::Failure(
        driver, result,
        Text("tensor map of ", format::kTensorNames[record.tensor], ": cuTensorMapEncodeTiled"));
  }
  return CorrectSmallMap(driver, record, map);
}

}  // namespace dynamo_moe
