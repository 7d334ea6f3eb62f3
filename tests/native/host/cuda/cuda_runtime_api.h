// As much of the CUDA toolkit's header as TensorRT's headers need, where there is no toolkit.
#pragma once

typedef struct CUstream_st* cudaStream_t;
typedef struct CUevent_st* cudaEvent_t;
