/* The C ABI of moekit: plain C11, the only interface whose binary stability is promised.
 *
 *   moekit_plan_options options;
 *   moekit_plan_options_init(&options, sizeof options);
 *   options.max_tokens = 16;
 *   moekit_layer* layer = NULL;
 *   if (moekit_layer_open("/models/Qwen3-30B-A3B", -1, &options, &layer) != MOEKIT_OK)
 *     fprintf(stderr, "%s\n", moekit_last_error());
 *
 * Rules. Every struct begins with struct_size = sizeof the struct as the caller was compiled;
 * structs only grow at their end, so a caller built against an older header works with a newer
 * library (what it does not know keeps its default). A newer caller works with an older library as
 * long as what the library does not know is zero. Functions that can fail return a moekit_status;
 * the message stands in moekit_last_error() of the same thread. Handles are made by *_create or
 * *_open and freed by *_free, which take NULL; a handle keeps alive what it was made from. No
 * exception leaves the library; it never prints and never ends the process. */
#ifndef MOEKIT_C_API_H
#define MOEKIT_C_API_H

/* NOLINTBEGIN(modernize-*): C */

#include <stddef.h>
#include <stdint.h>

#if defined(__GNUC__)
#define MOEKIT_C_API __attribute__((visibility("default")))
#else
#define MOEKIT_C_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

/* The major number changes when a compiled caller would break, and is the SONAME; the minor one
 * when something is added. */
#define MOEKIT_ABI_MAJOR 1
#define MOEKIT_ABI_MINOR 3

/* MOEKIT_ABI_MAJOR << 16 | MOEKIT_ABI_MINOR of the library that is loaded. */
MOEKIT_C_API uint32_t moekit_abi_version(void);
/* "0.1.0"; static. */
MOEKIT_C_API const char* moekit_version_string(void);

/* ---- errors ---- */

typedef int32_t moekit_status;
enum {
  MOEKIT_OK = 0,
  MOEKIT_INVALID_ARGUMENT = 1,
  MOEKIT_UNSUPPORTED = 2,
  MOEKIT_OUT_OF_MEMORY = 3,
  MOEKIT_CUDA = 4,
  MOEKIT_COMM = 5,
  MOEKIT_TIMEOUT = 6,
  MOEKIT_CORRUPT_FILE = 7,
  MOEKIT_INTERNAL = 8
};

/* "invalid_argument", ...; static. */
MOEKIT_C_API const char* moekit_status_name(moekit_status status);
/* What the last failing call of this thread expected, what came and what to do. Empty before the
 * first failure; valid until the next failing call of this thread. */
MOEKIT_C_API const char* moekit_last_error(void);

/* ---- tensors: the layout of DLPack's DLTensor, so a DLTensor* may be cast to a moekit_tensor*
 * ---- */

typedef struct moekit_device {
  int32_t device_type; /* 1 CPU, 2 CUDA */
  int32_t device_id;
} moekit_device;

typedef struct moekit_dtype {
  uint8_t code; /* MOEKIT_DTYPE_* */
  uint8_t bits;
  uint16_t lanes; /* 1; for float4 also 2: elements are pairs and the last axis counts pairs */
} moekit_dtype;

enum {
  MOEKIT_DTYPE_INT = 0,
  MOEKIT_DTYPE_UINT = 1,
  MOEKIT_DTYPE_FLOAT = 2,
  MOEKIT_DTYPE_BFLOAT = 4,
  MOEKIT_DTYPE_BOOL = 6,
  MOEKIT_DTYPE_FLOAT8_E4M3FN = 10,
  MOEKIT_DTYPE_FLOAT8_E5M2 = 12,
  MOEKIT_DTYPE_FLOAT8_E8M0FNU = 14,
  MOEKIT_DTYPE_FLOAT4_E2M1FN = 17
};

typedef struct moekit_tensor {
  void* data;
  moekit_device device;
  int32_t ndim; /* at most 6 */
  moekit_dtype dtype;
  const int64_t* shape;
  /* In elements, of any sign; NULL: row-major without gaps. All elements lie within 2^47 bytes of
   * data; those of a tensor that is written share no memory. */
  const int64_t* strides;
  uint64_t byte_offset; /* added to data */
} moekit_tensor;

/* ---- vocabulary ---- */

enum { /* moekit_weight_scheme.format */
       MOEKIT_WEIGHT_BF16 = 0,
       MOEKIT_WEIGHT_F16 = 1,
       MOEKIT_WEIGHT_F32 = 2,
       MOEKIT_WEIGHT_FP8_TENSOR = 3,
       MOEKIT_WEIGHT_FP8_CHANNEL = 4,
       MOEKIT_WEIGHT_FP8_BLOCK = 5,
       MOEKIT_WEIGHT_MXFP8 = 6,
       MOEKIT_WEIGHT_MXFP8_E5M2 = 7,
       MOEKIT_WEIGHT_MXFP4 = 8,
       MOEKIT_WEIGHT_NVFP4 = 9,
       MOEKIT_WEIGHT_INT4_GROUP = 10,
       MOEKIT_WEIGHT_INT8_GROUP = 11,
       MOEKIT_WEIGHT_INT4_CHANNEL = 12,
       MOEKIT_WEIGHT_INT8_CHANNEL = 13
};
enum { /* the format in which a GEMM reads its input */
       MOEKIT_INPUT_F32 = 0,
       MOEKIT_INPUT_BF16 = 1,
       MOEKIT_INPUT_FP8_TENSOR = 2,
       MOEKIT_INPUT_FP8_TOKEN = 3,
       MOEKIT_INPUT_FP8_BLOCK = 4,
       MOEKIT_INPUT_MXFP8 = 5,
       MOEKIT_INPUT_MXFP4 = 6,
       MOEKIT_INPUT_NVFP4 = 7
};
enum { MOEKIT_SCALE_MULTIPLIES = 0, MOEKIT_SCALE_DIVIDES = 1 };
enum {
  MOEKIT_ACTIVATION_SILU = 0,
  MOEKIT_ACTIVATION_GELU = 1,
  MOEKIT_ACTIVATION_GELU_TANH = 2,
  MOEKIT_ACTIVATION_SWIGLU_OAI = 3,
  MOEKIT_ACTIVATION_RELU2 = 4
};
enum {
  MOEKIT_SCORING_SOFTMAX = 0,
  MOEKIT_SCORING_SIGMOID = 1,
  MOEKIT_SCORING_SQRT_SOFTPLUS = 2,
  MOEKIT_SCORING_LOGITS = 3
};
enum { MOEKIT_SELECT_SCORES = 0, MOEKIT_SELECT_LOGITS = 1 };
enum {
  MOEKIT_ROUTER_WEIGHT_SCORES = 0,
  MOEKIT_ROUTER_WEIGHT_SOFTMAX_SELECTED = 1,
  MOEKIT_ROUTER_WEIGHT_SIGMOID_LOGIT = 2
};
enum {
  MOEKIT_RENORMALIZE_NONE = 0,
  MOEKIT_RENORMALIZE_SUM = 1,
  MOEKIT_RENORMALIZE_MAX_SUM = 2,
  MOEKIT_RENORMALIZE_P_NORM = 3
};
enum { MOEKIT_GROUP_SCORE_MAX = 0, MOEKIT_GROUP_SCORE_TOP2_SUM = 1 };
enum { MOEKIT_COMBINE_SLOTS = 0, MOEKIT_COMBINE_RANK_SUMS = 1 };
enum { MOEKIT_COMBINE_F32 = 0, MOEKIT_COMBINE_BF16 = 1 };
enum {
  MOEKIT_WIRE_AUTOMATIC = 0,
  MOEKIT_WIRE_F32 = 1,
  MOEKIT_WIRE_BF16 = 2,
  MOEKIT_WIRE_FP8_TOKEN = 3,
  MOEKIT_WIRE_FP8_BLOCK = 4,
  MOEKIT_WIRE_MXFP8 = 5,
  MOEKIT_WIRE_NVFP4 = 6
};
enum { MOEKIT_CAPACITY_EXACT = 0, MOEKIT_CAPACITY_REFUSE = 1, MOEKIT_CAPACITY_DROP = 2 };
enum { MOEKIT_ORDER_GATE_UP = 0, MOEKIT_ORDER_UP_GATE = 1, MOEKIT_ORDER_INTERLEAVED = 2 };
/* moekit_plan_options.activations: as the checkpoint says, per matrix. Any MOEKIT_INPUT_* forces
 * one format. */
#define MOEKIT_INPUT_FROM_CHECKPOINT (-1)

/* ---- what a layer is ---- */

typedef struct moekit_weight_scheme {
  int32_t format;      /* MOEKIT_WEIGHT_* */
  int32_t group;       /* K elements a scale, integer group formats only */
  int32_t zero_points; /* boolean */
} moekit_weight_scheme;

typedef struct moekit_input_scheme {
  int32_t format;       /* MOEKIT_INPUT_* */
  int32_t static_scale; /* boolean; the value travels with the matrix (moekit_matrix.input_scale) */
  int32_t sense;        /* of the static scale: MOEKIT_SCALE_* */
  int32_t ue8m0_scale;  /* boolean: the dynamic scale is rounded up to a power of two */
} moekit_input_scheme;

/* Field for field MoeConfig of moekit/config.h, where each field is defined. */
typedef struct moekit_config {
  uint32_t struct_size;
  int32_t activation; /* MOEKIT_ACTIVATION_* */
  int64_t num_experts, top_k, hidden, inter;
  int64_t latent; /* 0: the experts work on hidden */
  int32_t gated;
  float activation_limit; /* +infinity: none */
  float activation_alpha, activation_beta;
  int32_t has_gate_up_bias, has_down_bias;
  int32_t weight_on_input;
  moekit_weight_scheme gate_up_weights, down_weights;
  moekit_input_scheme gate_up_input, down_input;
  /* router */
  int32_t scoring, select_on, router_weight, renormalize;
  float epsilon, p, scaling_factor;
  int32_t num_groups, topk_groups, group_score;
  int32_t has_logit_bias, has_selection_bias, hash_routing;
  /* shared experts */
  int32_t shared_sigmoid_gate;
  int32_t reserved;     /* 0 */
  int64_t shared_inter; /* 0: none */
  moekit_weight_scheme shared_gate_up_weights, shared_down_weights;
  moekit_input_scheme shared_gate_up_input, shared_down_input;
} moekit_config;

/* Fills the defaults: silu, gated, softmax router, bf16 everywhere, no experts yet. */
MOEKIT_C_API moekit_status moekit_config_init(moekit_config* config, uint32_t struct_size);

/* ---- how it shall run ---- */

/* Called while a layer or a workspace is made or freed, never by a run; thread-safe, and alive
 * until the last handle that was made with it is freed. allocate returns NULL when there is no
 * memory; alignment is a power of two. */
typedef struct moekit_allocator {
  uint32_t struct_size;
  void* (*allocate)(void* user, size_t bytes, size_t alignment);
  void (*deallocate)(void* user, void* data, size_t bytes);
  void* user;
} moekit_allocator;

/* Ranks that are threads of this process, or this process's end of ranks that are processes. */
typedef struct moekit_group moekit_group;

/* Field for field PlanOptions of moekit/plan.h, where each field is defined. Strings are copied. */
typedef struct moekit_plan_options {
  uint32_t struct_size;
  int32_t activations; /* MOEKIT_INPUT_FROM_CHECKPOINT or MOEKIT_INPUT_* */
  int64_t max_tokens;  /* tokens of one call on this rank; must be set */
  const char* backend; /* NULL: automatic */
  const char* prepare; /* NULL: automatic */
  moekit_device device;
  const moekit_group* group; /* NULL: one rank */
  int32_t rank;              /* this thread's rank of `group`, or moekit_group_rank(group); 0
                              * without a group */
  int32_t combine;           /* MOEKIT_COMBINE_SLOTS or _RANK_SUMS */
  int32_t combine_dtype;     /* MOEKIT_COMBINE_F32 or _BF16 */
  int32_t wire;              /* MOEKIT_WIRE_* */
  const char* placement;     /* NULL: "linear" */
  int32_t batch_invariant;   /* boolean */
  int32_t capacity;          /* MOEKIT_CAPACITY_* */
  int64_t capacity_rows;
  int64_t deadline_ns;
  int32_t
      num_threads; /* 0: the CPUs that this process may use, divided by the ranks on this host */
  int32_t checked; /* boolean: ids out of range are errors; else they are dropped */
  const char* pack_cache;            /* directory of packed weights; NULL: none */
  const moekit_allocator* allocator; /* NULL: the C++ heap */
  /* since 1.1 */
  int64_t slots_per_rank; /* room for later placements; 0: the placement is fixed */
  int64_t staging_slots;
  int32_t load_statistics; /* boolean */
  int32_t tp;              /* tensor-parallel size */
} moekit_plan_options;

MOEKIT_C_API moekit_status moekit_plan_options_init(moekit_plan_options* options,
                                                    uint32_t struct_size);

/* num_ranks ranks in this process; every wait ends at the deadline (0: 30 s) with MOEKIT_TIMEOUT.
 * Each rank's thread opens its own layer with {group, rank} and runs it; opening and running are
 * collective. */
MOEKIT_C_API moekit_status moekit_group_create(int32_t num_ranks, int64_t deadline_ns,
                                               int32_t num_nodes, moekit_group** group);
MOEKIT_C_API int32_t moekit_group_size(const moekit_group* group);
MOEKIT_C_API void moekit_group_free(moekit_group* group);

/* What an application has that starts ranks as processes by its own means. Used while a group is
 * made, never later. Since 1.1. */
typedef struct moekit_bootstrap {
  uint32_t struct_size;
  int32_t rank, size;
  int32_t num_nodes;   /* 0: nodes are hosts; more: contiguous shares of the ranks */
  int64_t deadline_ns; /* 0: 30 s */
  /* recv[r * bytes, (r + 1) * bytes) = the bytes that rank r sends. Returns 0, or another number
   * where it failed: the group is then not made (MOEKIT_COMM). */
  int32_t (*allgather)(void* context, const void* send, void* recv, size_t bytes);
  int32_t (*barrier)(void* context); /* may be NULL */
  void* context;
} moekit_bootstrap;

/* This process's end of a group of processes on one host, over shared memory. Collective. */
MOEKIT_C_API moekit_status moekit_group_create_processes(const moekit_bootstrap* bootstrap,
                                                         moekit_group** group);
/* The same over MPI, also between hosts. mpi_comm is an MPI_Comm*, which is duplicated; the caller
 * has initialized MPI, and frees group and layers before it finalizes MPI. Collective. */
MOEKIT_C_API moekit_status moekit_group_create_mpi(const void* mpi_comm, int64_t deadline_ns,
                                                   int32_t num_nodes, moekit_group** group);
/* The rank whose end this is; -1 where all ranks are threads of this process. */
MOEKIT_C_API int32_t moekit_group_rank(const moekit_group* group);
/* Collective: the ends of the ranks that give the same color (below zero: *out is NULL), in the
 * order of (key, rank). `rank` as in moekit_plan_options. */
MOEKIT_C_API moekit_status moekit_group_split(const moekit_group* group, int32_t rank,
                                              int32_t color, int32_t key, moekit_group** out);
/* Fails the group: no peer waits for this rank any longer, each gets MOEKIT_COMM with `reason`.
 * Where `reason` has the words of an error that all ranks get alike (plans that differ, a capacity
 * that refuses), a peer that is still on its way there gets that error. */
MOEKIT_C_API void moekit_group_abort(const moekit_group* group, int32_t rank, const char* reason);

/* ---- weights in memory ---- */

/* One matrix, or one for all experts (stacked). NULL tensors are absent. */
typedef struct moekit_matrix {
  const moekit_tensor* codes;       /* [N, K] */
  const moekit_tensor* scales;      /* as the format defines; none for bf16, f16, f32 */
  const moekit_tensor* zeros;       /* integer zero points */
  const moekit_tensor* global;      /* nvfp4: f32 [] or [1] */
  const moekit_tensor* input_scale; /* static scale of the input: f32 [] or [1] */
  const moekit_tensor* bias;        /* [N]; of shared experts without a word in the config */
} moekit_matrix;

/* Either gate, up and down with one entry an expert (gate NULL without a gate), or the two stacked
 * matrices. The data lie in host memory and must outlive the layer; the structs need not. Tensors
 * and config say the same: a bias, router bias, selection bias, input_scale, shared expert or
 * latent projection that the config announces and that is missing here, or the other way round, is
 * MOEKIT_INVALID_ARGUMENT. hash_routing is refused: only a checkpoint brings its table. */
typedef struct moekit_layer_tensors {
  uint32_t struct_size;
  uint32_t matrix_size;                 /* sizeof(moekit_matrix), the step of the three arrays */
  const moekit_matrix* gate;            /* [num_experts], each [inter, hidden] */
  const moekit_matrix* up;              /* [num_experts], each [inter, hidden] */
  const moekit_matrix* down;            /* [num_experts], each [hidden, inter] */
  const moekit_matrix* gate_up_stacked; /* [E, 2 inter, hidden] */
  const moekit_matrix* down_stacked;    /* [E, hidden, inter] */
  int32_t stacked_order;                /* MOEKIT_ORDER_* */
  int32_t transposed;   /* boolean: stacked codes are [E, hidden, 2 inter] and [E, inter, hidden] */
  int32_t global_sense; /* MOEKIT_SCALE_* */
  int32_t reserved;     /* 0 */
  const moekit_tensor *router_weight, *router_bias, *selection_bias;
  const moekit_matrix *shared_gate_proj, *shared_up_proj, *shared_down_proj;
  const moekit_tensor* shared_gate; /* [1, hidden] */
  const moekit_tensor *latent_in, *latent_out;
} moekit_layer_tensors;

/* ---- a layer ---- */

typedef struct moekit_layer moekit_layer;
typedef struct moekit_workspace moekit_workspace;
typedef struct moekit_call moekit_call;

/* Decoder layer `layer` of a checkpoint directory (-1: its first MoE layer). */
MOEKIT_C_API moekit_status moekit_layer_open(const char* model_dir, int32_t layer,
                                             const moekit_plan_options* options,
                                             moekit_layer** out);
MOEKIT_C_API moekit_status moekit_layer_create(const moekit_config* config,
                                               const moekit_layer_tensors* tensors,
                                               const moekit_plan_options* options,
                                               moekit_layer** out);
/* For a rank that fails before it can call either, where its peers make a layer: they get
 * MOEKIT_COMM with `reason`, and the group is as good as before. The two functions above do so by
 * themselves. Collective: waits for the peers, at most for the group's deadline. `rank` as in
 * moekit_plan_options. */
MOEKIT_C_API void moekit_layer_refuse(const moekit_group* group, int32_t rank, const char* reason);
MOEKIT_C_API void moekit_layer_free(moekit_layer* layer);

/* config->struct_size must be set; the rest is filled. */
MOEKIT_C_API moekit_status moekit_layer_config(const moekit_layer* layer, moekit_config* config);
/* Every candidate with every reason, and the plan, as a JSON object. Free it with
 * moekit_string_free. */
MOEKIT_C_API moekit_status moekit_layer_explain(const moekit_layer* layer, char** json);
/* What a checkpoint holds, as a JSON object, without loading it. with_tensors adds the list of
 * tensors. */
MOEKIT_C_API moekit_status moekit_inspect(const char* model_dir, int32_t with_tensors, char** json);
MOEKIT_C_API void moekit_string_free(char* text);

/* A layer owns one workspace; each further call in flight needs one of its own. */
MOEKIT_C_API moekit_status moekit_workspace_create(const moekit_layer* layer,
                                                   moekit_workspace** out);
MOEKIT_C_API moekit_status moekit_workspace_bytes(const moekit_workspace* workspace,
                                                  int64_t* bytes);
MOEKIT_C_API void moekit_workspace_free(moekit_workspace* workspace);

/* Field for field LayerArgs of moekit/layer.h, where shapes and dtypes are defined. NULL tensors
 * are absent. */
typedef struct moekit_run_args {
  uint32_t struct_size;
  int32_t reserved;            /* 0 */
  const moekit_tensor* hidden; /* [T, hidden] */
  const moekit_tensor* hidden_scales;
  const moekit_tensor* hidden_global;
  const moekit_tensor* router_input;
  const moekit_tensor* topk_ids;     /* [T, k], NULL: the layer routes */
  const moekit_tensor* topk_weights; /* [T, k] f32, with topk_ids */
  const moekit_tensor* token_ids;    /* [T], hash routing only */
  const moekit_tensor* output;       /* [T, hidden], written */
  const moekit_tensor* out_topk_ids;
  const moekit_tensor* out_topk_weights;
  const moekit_tensor* out_router_logits;
  const moekit_tensor* out_routed;
  int64_t* out_dropped;
  void* stream;                /* NULL on the CPU */
  moekit_workspace* workspace; /* NULL: the layer's own */
} moekit_run_args;

/* hidden -> output. Collective over the ranks of the group. Concurrent calls on one layer need a
 * workspace each. */
MOEKIT_C_API moekit_status moekit_layer_run(const moekit_layer* layer, const moekit_run_args* args);

/* The same in steps: dispatch, experts, combine; other work may run between them. Tensors of `args`
 * must stay until combine has returned. ready tells whether the next step can run without waiting
 * for a peer; wait runs all steps that are left. */
MOEKIT_C_API moekit_status moekit_layer_dispatch(const moekit_layer* layer,
                                                 const moekit_run_args* args, moekit_call** out);
MOEKIT_C_API moekit_status moekit_call_ready(const moekit_call* call, int32_t* ready);
MOEKIT_C_API moekit_status moekit_call_wait(moekit_call* call);
MOEKIT_C_API moekit_status moekit_call_experts(moekit_call* call);
MOEKIT_C_API moekit_status moekit_call_combine(moekit_call* call);
MOEKIT_C_API void moekit_call_free(moekit_call* call);

/* ---- placement of experts and their load (since 1.1; moekit/placement.h defines the terms) ----
 */

/* Rank r holds the experts ids[first[r]] to ids[first[r + 1] - 1], in slot order. */
typedef struct moekit_placement {
  uint32_t struct_size;
  int32_t num_ranks;
  const int64_t* first; /* [num_ranks + 1], ascending from 0 */
  const int32_t* ids;
} moekit_placement;

typedef struct moekit_placement_change {
  uint32_t struct_size;
  int32_t reserved;
  int64_t experts_kept, experts_packed, bytes_packed;
} moekit_placement_change;

enum { MOEKIT_REBALANCE_GREEDY = 0, MOEKIT_REBALANCE_HIERARCHICAL = 1 };

typedef struct moekit_rebalance_options {
  uint32_t struct_size;
  int32_t num_ranks, num_nodes;
  int32_t policy;         /* MOEKIT_REBALANCE_* */
  int64_t slots_per_rank; /* 0: as few as hold all experts */
  int64_t num_groups;     /* of experts, hierarchical only; 0: none */
} moekit_rebalance_options;

/* A placement for these loads [num_experts], as one block: free it with moekit_placement_free. */
MOEKIT_C_API moekit_status moekit_rebalance(const int64_t* loads, int64_t num_experts,
                                            const moekit_rebalance_options* options,
                                            moekit_placement** out);
/* The placement in force, freed the same way. */
MOEKIT_C_API moekit_status moekit_layer_placement(const moekit_layer* layer,
                                                  moekit_placement** out);
MOEKIT_C_API void moekit_placement_free(moekit_placement* placement);

/* Collective, between two calls, with equal placements on all ranks; all or nothing. `change` may
 * be NULL. */
MOEKIT_C_API moekit_status moekit_layer_set_placement(moekit_layer* layer,
                                                      const moekit_placement* placement,
                                                      moekit_placement_change* change);

typedef struct moekit_load {
  uint32_t struct_size;
  int32_t all_ranks;     /* in: boolean: sum over the tokens of all ranks; collective */
  int64_t num_experts;   /* in: length of per_expert */
  int64_t num_ranks;     /* in: length of per_rank: ranks that share the experts out */
  int64_t* per_expert;   /* filled; or NULL */
  int64_t* per_rank;     /* filled; or NULL */
  int64_t calls, tokens; /* out */
  double imbalance;      /* out: heaviest rank over the mean */
} moekit_load;

/* What the calls asked for since the layer was made, the placement changed or the last reset.
 * MOEKIT_UNSUPPORTED when the plan has load_statistics off. */
MOEKIT_C_API moekit_status moekit_layer_load(const moekit_layer* layer, moekit_load* load);
MOEKIT_C_API moekit_status moekit_layer_reset_load(const moekit_layer* layer);

/* ---- routing and number formats as functions (since ABI 1.1) ---- */

typedef struct moekit_route_args {
  uint32_t struct_size;
  int32_t num_threads;                 /* 0: the CPUs that this process may use */
  const moekit_config* config;         /* the recipe, num_experts and top_k; the rest is not read */
  const moekit_tensor* logits;         /* [T, E] f32, bf16 or f16, logit bias included */
  const moekit_tensor* selection_bias; /* [E] f32; needed where the recipe has one */
  const moekit_tensor* token_ids;      /* [T] i64, hash routing only */
  const moekit_tensor* hash_table;     /* [rows, k] i64, hash routing only */
  const moekit_tensor* out_topk_ids;   /* [T, k] i32, written */
  const moekit_tensor* out_topk_weights; /* [T, k] f32, written */
} moekit_route_args;

/* Chooses experts. Columns go by descending weight, then lower id. All tensors but logits are
 * contiguous. A selection_bias is added whether or not the config announces one. */
MOEKIT_C_API moekit_status moekit_route(const moekit_route_args* args);

/* A matrix [N, K] and its quantized form. codes: one byte a code; two codes a byte, low nibble
 * first, for four bits ([N, ceil(K/2)]); integers carry 2^(bits-1) when they are symmetric; bf16,
 * f16 and f32 as they are. scales: [1, 1] a matrix, [N, 1] a row, [ceil(N/128), ceil(K/128)], or
 * [N, ceil(K/block)]; f32, bf16, f16 or e8m0 for fp8, f32, bf16 or f16 for integers, e8m0 for mx,
 * e4m3 for nvfp4 (either may come as bytes). zeros: bytes in the shape of scales. global: nvfp4's
 * f32 [1]. Tensors that the scheme does not have are NULL. */
typedef struct moekit_quantize_args {
  uint32_t struct_size;
  int32_t num_threads; /* 0: the CPUs that this process may use */
  moekit_weight_scheme scheme;
  int32_t global_sense;         /* MOEKIT_SCALE_* */
  const moekit_tensor* weights; /* [N, K] f32, bf16 or f16; dequantize writes it */
  const moekit_tensor *codes, *scales, *zeros, *global; /* quantize writes them, contiguous */
} moekit_quantize_args;

/* Rounds to nearest even under the scale as stored. Weights that are not finite are refused. */
MOEKIT_C_API moekit_status moekit_quantize(const moekit_quantize_args* args);
/* The exact values, rounded only to the type of `weights`. */
MOEKIT_C_API moekit_status moekit_dequantize(const moekit_quantize_args* args);

/* ---- threads (since ABI 1.3) ---- */

/* What the calling thread's calls compute on from now on: boolean `on`: the threads of the OpenMP
 * that the program has loaded into its global scope (libgomp, libomp, libiomp5), or 0: moekit's
 * own, the default. For programs whose other libraries compute with OpenMP in turns with moekit, as
 * torch does: idle OpenMP threads spin on the cores for a while. Layers of more threads than the
 * OpenMP team has keep their own. MOEKIT_UNSUPPORTED where no such OpenMP is loaded. Not in the
 * child of a fork, where OpenMP's threads are gone. */
MOEKIT_C_API moekit_status moekit_use_openmp(int32_t on);

#ifdef __cplusplus
}
#endif

/* NOLINTEND(modernize-*) */

#endif /* MOEKIT_C_API_H */
