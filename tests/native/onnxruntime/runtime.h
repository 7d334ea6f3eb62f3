// What stands for ONNX Runtime: registers a library's operators, makes kernels of nodes, and calls
// them with tensors, whose memory stands for the device's. Tests call it through ctypes.
//
// It has the entries of the interface that the operators of the CUDA provider need; any other one
// ends the process.
#pragma once

#include <cstddef>
#include <cstdint>

#include "onnxruntime/ort_abi.h"

namespace ort = dynamo_moe::onnxruntime;

struct Tensor {
  std::int32_t type;          // 0: there is none.
  std::int32_t rank;          // -1: of a node's input, unknown.
  const std::int64_t* sizes;  // -1: of a node's input, unknown.
  void* data;                 // Null: of a node's input, not constant.
};

using RegisterFunction = OrtStatus* (*)(OrtSessionOptions*, const ort::ApiBase*);

extern "C" {
// Functions that may fail return null, or why they did, until this thread's next failure.

// The code of that failure.
std::int32_t ort_failure_code();

// The runtime's version from now on: "1.31.1" at first. It has no later entries.
void ort_set_version(const char* version);

OrtSessionOptions* ort_options_new();
void ort_options_free(OrtSessionOptions* options);
void ort_options_entry(OrtSessionOptions* options, const char* key, const char* value);
const char* ort_register(OrtSessionOptions* options, RegisterFunction function);
// Null if there is none for tokens of this type.
const ort::CustomOp* ort_operator(const OrtSessionOptions* options, const char* domain,
                                  const char* name, const char* provider, std::int32_t type);

OrtKernelInfo* ort_node_new(const char* name, const Tensor* inputs, std::size_t count);
void ort_node_free(OrtKernelInfo* node);
void ort_node_integer(OrtKernelInfo* node, const char* name, std::int64_t value);
void ort_node_number(OrtKernelInfo* node, const char* name, float value);
void ort_node_text(OrtKernelInfo* node, const char* name, const char* value);

const char* ort_kernel_new(const ort::CustomOp* op, const OrtKernelInfo* node, void** kernel);
void ort_kernel_free(const ort::CustomOp* op, void* kernel);
// y has x's sizes, and is at an address.
const char* ort_call(const ort::CustomOp* op, void* kernel, const Tensor* inputs, std::size_t count,
                     void* y, void* stream);

// Makes the next request for scratch memory fail: 1 with a status, 2 with null.
void ort_fail_scratch(std::int32_t how);
// The objects that the library has not released.
std::int64_t ort_live();
// The oldest message of the log, "level text"; null if there is none.
const char* ort_message();
}
