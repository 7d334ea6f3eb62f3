/* The launcher's C interface: reads kernel bundles and enqueues MoE layers on CUDA streams.
 *
 * Every function that can fail returns a status; dynamo_moe_last_error() says what went wrong in
 * the calling thread's last failed call. No function throws, exits or prints. All functions may be
 * called from several threads at once, even on the same program. docs/reference/bundle.md has the
 * format.
 *
 * This header is C and needs only <stddef.h> and <stdint.h>.
 */
#ifndef DYNAMO_MOE_H_
#define DYNAMO_MOE_H_

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define DYNAMO_MOE_API __attribute__((visibility("default")))

typedef enum dynamo_moe_status {
  DYNAMO_MOE_OK = 0,
  DYNAMO_MOE_INVALID_ARGUMENT = 1, /* An argument of this call breaks a rule. */
  DYNAMO_MOE_INVALID_BUNDLE =
      2,                       /* The bytes are not a bundle or program that this library reads. */
  DYNAMO_MOE_NOT_FOUND = 3,    /* No program fits the layer and architecture. */
  DYNAMO_MOE_NO_DRIVER = 4,    /* libcuda.so.1 is missing, too old, or there is no device. */
  DYNAMO_MOE_CUDA_ERROR = 5,   /* A driver function failed. */
  DYNAMO_MOE_OUT_OF_MEMORY = 6 /* Host or device memory is exhausted. */
} dynamo_moe_status;

/* The bundle's layer record: 112 bytes, compared as bytes. */
typedef struct dynamo_moe_layer {
  uint32_t op;
  uint32_t tokens_dtype;
  uint32_t experts_dtype; /* b1's and b2's, and what tokens and hidden rows are rounded to. */
  uint32_t routing_dtype; /* router_weight's, or expert_ids'. */
  uint32_t weights_dtype; /* router_bias's (0: none), or expert_weights'. */
  uint32_t flags;
  uint32_t activation;
  uint32_t scoring;
  uint32_t experts;
  uint32_t top_k;
  uint32_t width;
  uint32_t hidden;
  float routed_scaling;
  float alpha;
  float limit;
  float norm_eps;
  uint32_t group_scoring;
  uint32_t n_group;
  uint32_t topk_group;
  uint32_t selection_dtype;  /* selection_bias's (0: none). */
  uint32_t resident_experts; /* Slots for experts whose weights lie in host memory (0: none). */
  uint32_t weight_format;    /* How w1 and w2 are stored. */
  uint32_t block_rows;       /* The (out, in) sizes of the part of an expert's matrix that has a */
  uint32_t block_columns;    /* scale of its own (0: all, or there are no scales). */
  uint32_t scales_dtype;     /* 0: there are none. */
  uint32_t zero_points;      /* 1: one for each scale; 2: one for each expert (0: none). */
  uint32_t reserved[2];      /* 0. */
} dynamo_moe_layer;

/* Device pointers, multiples of 16, null where the layer has no such tensor. The tensors are
 * contiguous: x, y [T, D]; router_weight [E, D]; router_bias, selection_bias [E]; expert_ids,
 * expert_weights [T, K]; w1 [E, F, D], or [E, D, F] where the layer has it transposed; b1 [E, F];
 * w2 [E, D, H], or [E, H, D]; b2 [E, D], with F = H, or 2H when gated. Of packed weights, w1 and w2
 * are bytes [E, F, D / n] and [E, D, H / n], n values each; scales are [E, F / R, D / C] for blocks
 * of R rows and C columns, rounded up, and zero points as these or [E, 1, 1]; global scales are
 * float32 [E, F, 1] and [E, D, 1]. */
typedef struct dynamo_moe_tensors {
  const void* x;
  const void* router_weight;
  const void* router_bias;
  const void* selection_bias;
  const void* expert_ids;
  const void* expert_weights;
  const void* w1;
  const void* w1_scales;
  const void* w1_zero_points;
  const void* w1_global_scales;
  const void* b1;
  const void* w2;
  const void* w2_scales;
  const void* w2_zero_points;
  const void* w2_global_scales;
  const void* b2;
  void* y;
} dynamo_moe_tensors;

typedef struct dynamo_moe_program dynamo_moe_program;
typedef struct dynamo_moe_cache dynamo_moe_cache;

/* The size and a hash of bytes. */
typedef struct dynamo_moe_key {
  uint64_t size;
  uint64_t hash;
} dynamo_moe_key;

/* What went wrong in this thread's last failed call; "" before the first failure. Valid until the
 * thread's next failed call. */
DYNAMO_MOE_API const char* dynamo_moe_last_error(void);

/* The number of programs in a bundle. Checks all of the bundle. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_bundle_count(const void* bundle, size_t size,
                                                         uint32_t* count);

/* Program number `index` of a bundle: its layer, architecture and bytes, which lie in the bundle.
 * Checks all of the bundle. Any of the results may be null. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_bundle_program(const void* bundle, size_t size,
                                                           uint32_t index, dynamo_moe_layer* layer,
                                                           uint32_t* architecture,
                                                           const void** program,
                                                           size_t* program_size);

/* Finds the program of a layer that runs on an architecture (90 for sm_90): compiled for it, or, if
 * there is none, for the nearest lower one of the same major version where code is compatible
 * (sm_80 to sm_89, without sm_87). The program's bytes lie in the bundle. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_bundle_find(const void* bundle, size_t size,
                                                        const dynamo_moe_layer* layer,
                                                        uint32_t architecture, const void** program,
                                                        size_t* program_size);

/* What is in a bundle, as JSON in UTF-8; docs/reference/bundle.md describes it. Checks all of the
 * bundle. Free the text with dynamo_moe_json_free(). */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_bundle_describe(const void* bundle, size_t size,
                                                            char** json);

/* Null is permitted. */
DYNAMO_MOE_API void dynamo_moe_json_free(char* json);

/* A layer's sizes, dtypes and options in words, as JSON. Checks the layer. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_layer_describe(const dynamo_moe_layer* layer,
                                                           char** json);

/* The value of an expression, whose instructions have 16 bytes each as in a bundle, for the values
 * of T, E, K, D, H and the wave. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_expression_evaluate(const void* instructions,
                                                                size_t count, const int64_t* sizes,
                                                                int64_t* value);

/* Opens a layer's kernels: a program, or a bundle whose programs are all of one layer, for one or
 * more architectures. The device decides which of them runs. The bytes are copied; equal ones share
 * their memory and their loaded modules. Needs no driver. Close it with
 * dynamo_moe_program_close(). */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_open(const void* data, size_t size,
                                                         dynamo_moe_program** program);

/* Names the bytes that were opened by their content. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_key(const dynamo_moe_program* program,
                                                        dynamo_moe_key* key);

/* Opens kernels that are open elsewhere in this process, by their key. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_find(const dynamo_moe_key* key,
                                                         dynamo_moe_program** program);

/* Null is permitted. No launch of the program may be running. */
DYNAMO_MOE_API void dynamo_moe_program_close(dynamo_moe_program* program);

DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_info(const dynamo_moe_program* program,
                                                         dynamo_moe_layer* layer);

/* The bytes that were opened; valid until it is closed. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_bytes(const dynamo_moe_program* program,
                                                          const void** data, size_t* size);

/* The workspace in bytes that suffices for every T in 0..max_tokens on every architecture. Needs no
 * driver. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_workspace(const dynamo_moe_program* program,
                                                              int64_t max_tokens, size_t* bytes);

/* Loads the kernels into the calling thread's current context; does nothing where it has none.
 * dynamo_moe_program_enqueue() loads by itself; call this first where that is not permitted later,
 * as in a stream capture. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_prepare(dynamo_moe_program* program);

/* Enqueues the layer for T = tokens on a stream (a CUstream) of the current context; where there is
 * none, the stream's own is current during the call. The workspace is device memory, a multiple of
 * 256; it may be reused once the stream has passed the call. Synchronises nothing and, once the
 * kernels are loaded, allocates nothing on the device. A failed call may have enqueued a part of
 * the layer; y is undefined then. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_enqueue(dynamo_moe_program* program,
                                                            int64_t tokens,
                                                            const dynamo_moe_tensors* tensors,
                                                            void* workspace, size_t workspace_size,
                                                            void* stream);

/* The bytes of device memory that a cache of the layer's experts has, on the architecture that
 * needs most; 0 where the layer is fully resident, w1 and w2 being tensors on the device. Needs no
 * driver. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_program_state(const dynamo_moe_program* program,
                                                          size_t* bytes);

/* Opens an empty cache of experts for a layer that is offloaded: whose w1 and w2 lie in host
 * memory, of which the device holds resident_experts experts at a time. A source says where the
 * tensors of a weight lie in safetensors files, each on a line of its own: its values, scales and
 * zero points, of which the layer has the first, the first two or all. Each line is "<offset>
 * <bytes> <file's bytes> <header's bytes> <header's CRC-32 in 8 hexadecimal digits> <absolute
 * path>"; the header is the length and the JSON text with which the file begins. The file is looked
 * for in the folder that the environment variable DYNAMO_MOE_WEIGHTS names, then at its path; one
 * that is missing, or another by its size or header, is an error. Where both sources are null, w1
 * and w2 of each call, with their scales and zero points, are addresses of pinned host memory, as
 * the device knows it. If `shared` is not 0, calls may be on any streams, and wait for one another;
 * else the caller orders them. Shared caches of equal layers with the same tensors of files are one
 * in each context of this process. Needs no driver. Close it with dynamo_moe_cache_close(). */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_cache_open(const dynamo_moe_program* program,
                                                       const char* w1_source, const char* w2_source,
                                                       int shared, dynamo_moe_cache** cache);

/* Null is permitted. No call of the cache may be running. */
DYNAMO_MOE_API void dynamo_moe_cache_close(dynamo_moe_cache* cache);

/* As dynamo_moe_program_prepare(); also allocates the cache's memory and pins the weights, in the
 * current context, in which the cache then lies. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_cache_prepare(dynamo_moe_cache* cache);

/* Why weights were copied to pinned memory, and what to do about it; "" where the files' own pages
 * are pinned, or before dynamo_moe_cache_prepare(). Valid until the cache is closed. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_cache_note(const dynamo_moe_cache* cache,
                                                       const char** note);

/* As dynamo_moe_program_enqueue(), for a layer that is offloaded; w1 and w2 are ignored where the
 * cache has sources. Copies run on a stream of the cache, which the given one waits for. A call
 * that fails empties the cache on the stream, or if that fails too, the next call does. In a stream
 * capture, the cache must be prepared, not shared, and not have to be emptied. A graph may be
 * replayed once the stream has passed the other calls; not after a call that failed if emptying the
 * cache may have failed too, before another call has succeeded. Without sources, the graph has the
 * addresses of the captured call's w1 and w2: the cache's later calls must have no others as long
 * as it is replayed. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_cache_enqueue(dynamo_moe_cache* cache, int64_t tokens,
                                                          const dynamo_moe_tensors* tensors,
                                                          void* workspace, size_t workspace_size,
                                                          void* stream);

/* Until dynamo_moe_kernels_end(), the plugins that this thread creates for layers take their
 * kernels from this bundle, and of every architecture in it, whatever the environment names. Only
 * the attribute kernels of a layer comes first. The bytes are copied; the name stands for the
 * bundle in messages. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_kernels_begin(const char* name, const void* data,
                                                          size_t size);
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_kernels_end(void);

/* Until dynamo_moe_sharing_end(), the plugins that this thread creates for layers are of one
 * network, whose engine stores equal kernels once: with one layer, in whose place the others name
 * it. */
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_sharing_begin(void);
DYNAMO_MOE_API dynamo_moe_status dynamo_moe_sharing_end(void);

#ifdef __cplusplus
}
#endif

#endif /* DYNAMO_MOE_H_ */
