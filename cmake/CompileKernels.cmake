# Compiles the kernels of named layers while the wheel is built, and packs them beside the library:
#
#   pip install . --no-build-isolation \
#     -C cmake.define.DYNAMO_MOE_KERNELS="experts=8,top_k=2,width=768,hidden=3072,dtype=fp16" \
#     -C cmake.define.DYNAMO_MOE_ARCHITECTURES="sm_90;sm_89"
#
# Layers, as `dynamo-moe compile --spec` takes them, and architectures are separated by semicolons.
# The Python that builds needs torch, triton and rich.

set(DYNAMO_MOE_KERNELS "" CACHE STRING "Layers to compile kernels for; none: no kernels")
set(DYNAMO_MOE_ARCHITECTURES "" CACHE STRING "GPU architectures to compile kernels for")

if(DYNAMO_MOE_KERNELS STREQUAL "")
  return()
endif()
if(DYNAMO_MOE_ARCHITECTURES STREQUAL "")
  message(FATAL_ERROR "DYNAMO_MOE_KERNELS needs DYNAMO_MOE_ARCHITECTURES, such as sm_90;sm_89")
endif()

find_package(Python 3.11 REQUIRED COMPONENTS Interpreter)

set(arguments "")
foreach(spec IN LISTS DYNAMO_MOE_KERNELS)
  list(APPEND arguments --spec "${spec}")
endforeach()
foreach(architecture IN LISTS DYNAMO_MOE_ARCHITECTURES)
  list(APPEND arguments --arch "${architecture}")
endforeach()

file(GLOB sources CONFIGURE_DEPENDS custom_ops/*.py custom_ops/kernels/*.py
     custom_ops/kernels/tuned/*.json trt_plugin/*.py trt_plugin/*/*.py)
set(bundle "${CMAKE_CURRENT_BINARY_DIR}/dynamo_moe.moek")
add_custom_command(
  OUTPUT "${bundle}"
  COMMAND ${CMAKE_COMMAND} -E env "PYTHONPATH=${CMAKE_CURRENT_SOURCE_DIR}" "${Python_EXECUTABLE}" -m
          trt_plugin --out "${bundle}" ${arguments}
  DEPENDS ${sources}
  COMMENT "Compiling kernels"
  USES_TERMINAL VERBATIM)
add_custom_target(dynamo_moe_kernels ALL DEPENDS "${bundle}")
install(FILES "${bundle}" DESTINATION trt_plugin)
