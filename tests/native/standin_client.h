// The stand-in for the driver, as programs that exercise the library under sanitizers use it.
#pragma once

#include <dlfcn.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <iterator>
#include <string>

#include "bundle/format.h"
#include "dynamo_moe.h"

#define CHECK(condition)                                                          \
  do {                                                                            \
    if (!(condition)) {                                                           \
      std::fprintf(stderr, "line %d: %s; last error: %s\n", __LINE__, #condition, \
                   dynamo_moe_last_error());                                      \
      std::exit(1);                                                               \
    }                                                                             \
  } while (false)

struct Standin {
  void (*reset)();
  int (*add_device)(int, int);
  int (*add_image)(const char*, std::size_t);
  void* (*create_context)(int);
  void (*destroy_context)(void*);
  void* (*create_stream)(void*);
  void (*set_context)(void*);
  void (*fail)(const char*, int, int);
  int (*live_modules)();
  int (*live)(const char*);
};

template <typename Function>
void Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  CHECK(*function != nullptr);
}

inline Standin LoadStandin() {
  void* const library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  CHECK(library != nullptr);
  Standin standin = {};
  Find(library, "standin_reset", &standin.reset);
  Find(library, "standin_add_device", &standin.add_device);
  Find(library, "standin_add_image", &standin.add_image);
  Find(library, "standin_create_context", &standin.create_context);
  Find(library, "standin_destroy_context", &standin.destroy_context);
  Find(library, "standin_create_stream", &standin.create_stream);
  Find(library, "standin_set_context", &standin.set_context);
  Find(library, "standin_fail", &standin.fail);
  Find(library, "standin_live_modules", &standin.live_modules);
  Find(library, "standin_live", &standin.live);
  return standin;
}

inline void CheckNothingIsLeft(const Standin& cuda) {
  for (const char* const kind : {"memory", "registrations", "pinned memory", "streams", "events"}) {
    CHECK(cuda.live(kind) == 0);
  }
}

inline std::string Read(const char* path) {
  std::ifstream file(path, std::ios::binary);
  CHECK(file.good());
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

inline std::string ProgramOf(const std::string& bundle, std::uint32_t index = 0) {
  const void* program = nullptr;
  std::size_t size = 0;
  CHECK(dynamo_moe_bundle_program(bundle.data(), bundle.size(), index, nullptr, nullptr, &program,
                                  &size) == DYNAMO_MOE_OK);
  return {static_cast<const char*>(program), size};
}

// Tells the stand-in the images of a program's kernels.
inline void AddImages(const Standin& cuda, const std::string& program) {
  namespace format = dynamo_moe::format;
  format::ProgramHeader header;
  std::memcpy(&header, program.data(), sizeof(header));
  const format::Table& kernels = header.tables[format::kKernels];
  for (std::uint64_t i = 0; i < kernels.count; ++i) {
    format::Kernel kernel;
    std::memcpy(&kernel, program.data() + kernels.offset + i * sizeof(kernel), sizeof(kernel));
    cuda.add_image(program.data() + header.tables[format::kImages].offset + kernel.image_offset,
                   kernel.image_size);
  }
}
