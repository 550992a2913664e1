/* dualkv: shared-prompt attention for RL post-training. C interface.
 *
 * A packed batch holds the rows (tokens) of a forest of segments in preorder: a segment's parent is its
 * prefix, a root has none. A row sees its own segment up to itself and all of every ancestor, nothing else.
 * The usual life of a batch:
 *
 *   dualkv_step_schedule_create           lengths -> which rank takes which responses, in which micro-batches
 *   dualkv_pack | dualkv_pack_padded      token ids -> packed batch with its forest, positions and targets
 *   dualkv_plan_create                    forest -> tile schedules, once for all layers of a model
 *   dualkv_attention_forward / _backward  in each layer
 *   dualkv_linear_logprob_forward / ...   hidden states -> log-probabilities and entropies of the targets
 *
 * Conventions
 *   - Every function that can fail returns a dualkv_status. On failure nothing has been computed and
 *     dualkv_last_error() describes the fault, naming the argument and its value.
 *   - A parameter struct starts with `size` and `version`; set them to sizeof(struct) and
 *     DUALKV_ABI_VERSION. Zero every field that is not used.
 *   - The library never prints, never aborts and keeps no state between calls except the message of the
 *     last error of each thread. Objects are immutable once made: any number of threads may read one.
 *   - Strides are counted in elements. The last dimension of every tensor has stride 1.
 *   - Tensors are read and written in place; outputs must not overlap inputs.
 */
#ifndef DUALKV_DUALKV_H_
#define DUALKV_DUALKV_H_

#include <stddef.h>
#include <stdint.h>

#define DUALKV_VERSION "0.1.0"
#define DUALKV_ABI_VERSION 1u

#define DUALKV_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

/* ---------------------------------------------------------------------------------------------- status */

typedef enum dualkv_status {
  DUALKV_OK = 0,
  DUALKV_INVALID_ARGUMENT = 1, /* the caller's mistake; the message names the argument and the values */
  DUALKV_UNSUPPORTED = 2,      /* a valid request that this build or this device cannot serve */
  DUALKV_OUT_OF_MEMORY = 3,    /* host memory */
  DUALKV_INTERNAL = 4          /* a fault of the library */
} dualkv_status;

/* Message of the last failed call of the calling thread; "" if none failed. Valid until that thread's next
 * failing call. */
DUALKV_API const char* dualkv_last_error(void);

/* Release of the library, as in DUALKV_VERSION. */
DUALKV_API const char* dualkv_version(void);

/* DUALKV_ABI_VERSION that the library was built with. */
DUALKV_API uint32_t dualkv_abi_version(void);

/* SIMD instruction set that the CPU backend uses on this machine, e.g. "AVX3". */
DUALKV_API const char* dualkv_cpu_target(void);

/* ---------------------------------------------------------------------------------------------- forest */

typedef struct dualkv_forest dualkv_forest;

/* One segment: the rows [begin, end). Its subtree is [begin, tree_end). */
typedef struct dualkv_segment {
  int32_t begin;
  int32_t end;
  int32_t tree_end;
  int32_t position; /* position of row `begin`: the summed lengths of all ancestors */
  int32_t parent;   /* index of the parent segment, -1 for a root */
} dualkv_segment;

typedef struct dualkv_forest_view {
  uint32_t size;
  uint32_t version;
  int64_t num_segments;
  int64_t total_tokens;
  const dualkv_segment* segments; /* [num_segments], owned by the forest */
} dualkv_forest_view;

/* Builds a forest from segment lengths and parents in preorder. lengths [num_segments] >= 0; parents
 * [num_segments] is -1 or an earlier segment that is still open, that is the previous segment or one of its
 * ancestors. At most 2^30 rows and 2^30 segments in all. Segments may be empty, and so may the forest. */
DUALKV_API dualkv_status dualkv_forest_create(int64_t num_segments, const int64_t* lengths,
                                              const int64_t* parents, dualkv_forest** forest);

/* Builds the forest of GRPO groups: for each group a root of prompt_lengths[g] rows with response_counts[g]
 * leaves; response_lengths holds the leaves of all groups, one group after the other. */
DUALKV_API dualkv_status dualkv_forest_create_from_groups(int64_t num_groups, const int64_t* prompt_lengths,
                                                          const int64_t* response_counts,
                                                          const int64_t* response_lengths,
                                                          dualkv_forest** forest);

DUALKV_API void dualkv_forest_destroy(dualkv_forest* forest);

DUALKV_API dualkv_status dualkv_forest_get_view(const dualkv_forest* forest, dualkv_forest_view* view);

/* Position of every row, for rotary embeddings: position_ids [total_tokens]. */
DUALKV_API dualkv_status dualkv_forest_position_ids(const dualkv_forest* forest, int64_t* position_ids);

/* Number of (row, key) pairs that see each other. window_left as in dualkv_plan_params. */
DUALKV_API dualkv_status dualkv_forest_visible_pairs(const dualkv_forest* forest, int64_t window_left,
                                                     int64_t* pairs);

/* ------------------------------------------------------------------------------------------------ plan */

typedef enum dualkv_device { DUALKV_CPU = 0, DUALKV_CUDA = 1 } dualkv_device;

typedef struct dualkv_plan dualkv_plan;

#define DUALKV_NO_WINDOW ((int64_t)-1)

typedef struct dualkv_plan_params {
  uint32_t size;
  uint32_t version;
  const dualkv_forest* forest; /* read during the call only */
  int64_t window_left;         /* earlier positions that a row sees besides itself, >= 0, or
                                  DUALKV_NO_WINDOW. A model's window of w tokens is window_left = w - 1. */
  const uint8_t* keys_only;    /* [num_segments] or NULL: nonzero for segments whose rows are keys and
                                  values for others but are not queries themselves */
  int32_t forward_query_tile;  /* rows of a tile, 1 to 65536; 0 chooses the CPU backend's */
  int32_t forward_key_tile;
  int32_t backward_query_tile;
  int32_t backward_key_tile;
  int32_t backward_parts; /* 0 to 65536. 0: the backward's key tiles stay whole, as the CPU backend needs
                             them. n > 0: where one makes more than 1 / n of all visits to query tiles, those
                             of its segment are cut, counted from the last query tile that they visit, into
                             parts of as many visits each: the fewest that make at most 1 / n, or a single
                             visit */
  int32_t reserved;
} dualkv_plan_params;

/* A tile of the schedule: rows [begin, end), and the runs that it visits. */
typedef struct dualkv_tile {
  int32_t begin;
  int32_t end;
  int32_t run_begin; /* index into runs */
  int32_t run_end;
} dualkv_tile;

/* Consecutive tiles of the other side: [begin, end) cut every `key_tile` (forward) or `query_tile`
 * (backward) rows from `begin` on; the last may be narrower. */
typedef struct dualkv_run {
  int32_t begin;
  int32_t end;
  int32_t segment; /* the segment that the keys belong to */
  int32_t masked;  /* 0: each row sees each key, no mask is needed; 1: some pair is hidden */
} dualkv_run;

/* Forward: `tiles` are query tiles, runs are of keys, in the order in which a row walks them. Query tiles
 * are cut every `query_tile` rows from the root of each tree on, and each stays within one tree.
 * Backward: `tiles` are key tiles, runs are of query rows. Key tiles are cut every `key_tile` rows from the
 * start of each segment on; query tiles as in the forward. Each part of a key tile that was cut (see
 * backward_parts) is a tile of its own, with the rows of the whole and its share of the visits.
 * Both are sorted for a machine that takes the tiles in order. Forward: heavy ones first. Backward: band by
 * band. A band is the key tiles of a segment, or the parts of these that visit the same query rows, in the
 * order of their rows. Bands of a segment whose tiles, or parts, make more visits come first, if the most
 * that one makes has more binary digits; otherwise they are in the order of their rows. */
typedef struct dualkv_schedule {
  int32_t query_tile;
  int32_t key_tile;
  int64_t num_tiles;
  int64_t num_runs;
  const dualkv_tile* tiles; /* [num_tiles] */
  const dualkv_run* runs;   /* [num_runs] */
} dualkv_schedule;

typedef struct dualkv_plan_view {
  uint32_t size;
  uint32_t version;
  int64_t window_left;
  int64_t num_segments;
  int64_t total_tokens;
  const dualkv_segment* segments; /* [num_segments] */
  const int32_t* positions;       /* [total_tokens] position of every row; NULL without a window */
  dualkv_schedule forward;
  dualkv_schedule backward;
  /* Order in which the backward adds to dQ, for results that repeat. Query tiles of the backward are numbered
   * by their rows; run r visits the tiles first_query_tile[r], first_query_tile[r] + 1, ..., and is the
   * turn[r]-th visit to each of them, counted from 0 in schedule order. Runs end where the turn changes. */
  int64_t num_query_tiles;
  const int32_t* first_query_tile; /* [backward.num_runs] */
  const int32_t* turn;             /* [backward.num_runs] */
  /* Order in which the backward adds the parts of a key tile. They have consecutive indices among all parts,
   * in the order of the query rows that they visit. */
  int64_t num_partials;
  const int32_t* partial; /* [backward.num_tiles] index of the part; -1 for a tile that is whole */
  const int32_t* band;    /* [backward.num_tiles] index of the first tile of the band */
} dualkv_plan_view;

DUALKV_API dualkv_status dualkv_plan_create(const dualkv_plan_params* params, dualkv_plan** plan);
DUALKV_API void dualkv_plan_destroy(dualkv_plan* plan);
/* The pointers in the view are owned by the plan. */
DUALKV_API dualkv_status dualkv_plan_get_view(const dualkv_plan* plan, dualkv_plan_view* view);

/* Sets the tile sizes and backward_parts of `params` to those of the kernels of `device` (a dualkv_device)
 * for attention of these dimensions; nothing else of `params` is read or changed. On CUDA a plan must have
 * them. */
DUALKV_API dualkv_status dualkv_plan_set_tiles(dualkv_plan_params* params, int32_t device, int32_t num_heads,
                                               int32_t num_kv_heads, int32_t head_dim);

/* The image of a plan is what the kernels of a GPU read. It holds no addresses: write it to host memory, copy
 * it to device memory that is aligned to 16 bytes, and pass that as device_plan. A captured CUDA graph keeps
 * the address: it can be replayed with another plan of the same tile sizes and backward_parts whose image has
 * been copied there, whose forest fits in the call's key_rows and in query_row_begin + query_rows, and whose
 * rows before query_row_begin are keys only; a backward, only if it was captured with any_plan. */
DUALKV_API dualkv_status dualkv_plan_image_bytes(const dualkv_plan* plan, size_t* bytes);
DUALKV_API dualkv_status dualkv_plan_write_image(const dualkv_plan* plan, void* image, size_t image_bytes);

/* ------------------------------------------------------------------------------------------- attention */

typedef enum dualkv_dtype {
  DUALKV_FLOAT64 = 0,
  DUALKV_FLOAT32 = 1,
  DUALKV_BFLOAT16 = 2,
  DUALKV_FLOAT16 = 3
} dualkv_dtype;

/* A [rows, heads, head_dim] tensor: element (t, h, d) is at data[t * row_stride + h * head_stride + d].
 * At most 2^56 elements. */
typedef struct dualkv_tensor {
  void* data;
  int64_t row_stride;
  int64_t head_stride;
} dualkv_tensor;

/* "Accumulation type" below is double for DUALKV_FLOAT64 and float for every other dtype. */
typedef struct dualkv_attention_params {
  uint32_t size;
  uint32_t version;
  int32_t device;          /* dualkv_device */
  int32_t dtype;           /* dualkv_dtype of q, k, v, out and their gradients */
  int32_t num_threads;     /* CPU: threads to use; 0 takes one for each core */
  int32_t num_heads;       /* H, a multiple of Hk */
  int32_t num_kv_heads;    /* Hk */
  int32_t head_dim;        /* D, 1 to 512 */
  const dualkv_plan* plan; /* a forest of T rows */
  int64_t query_rows;      /* rows of q, out and lse */
  int64_t query_row_begin; /* row of the forest that is row 0 of q, out and lse; the rows before it must be
                              of keys-only segments. Otherwise 0. query_row_begin + query_rows >= T */
  int64_t key_rows;        /* rows of k and v, >= T */
  double scale;            /* scores are scale * q.k, any finite value */
  double softcap;          /* c > 0 makes scores c * tanh(score / c); 0 does not */
  dualkv_tensor q;         /* [query_rows, H, D] */
  dualkv_tensor k;         /* [key_rows, Hk, D] */
  dualkv_tensor v;         /* [key_rows, Hk, D] */
  const void* sinks;       /* [H] of the accumulation type, or NULL: one extra logit a head, with no value */
  dualkv_tensor out;       /* [query_rows, H, D] */
  void* lse;               /* [H, query_rows] of the accumulation type, contiguous: natural log of the sum of
                              exp(score), the sink's included. Written by the forward (may be NULL there),
                              read by the backward */
  const void* device_plan; /* CUDA: the image of `plan` in device memory, see dualkv_plan_image_bytes */
  size_t device_plan_bytes;
  void* stream; /* CUDA: the cudaStream_t to launch on, of the current device; NULL: the default stream */
} dualkv_attention_params;

/* On CUDA: tensors, sinks and lse are in the memory of the current device, which has compute capability 9.0;
 * bfloat16 or float16; head_dim is a multiple of 8 up to 128; data is aligned to 16 bytes and strides are
 * multiples of 8. One kernel is launched on `stream`; nothing is allocated and nothing is waited for.
 *
 * out and lse of every query row. Rows that are no queries (past the last segment, or of keys-only
 * segments) get out = 0 and lse = -inf. A row's bits do not depend on the rest of the batch, as long
 * as that is finite: as in every tiled attention, a NaN or an infinity can reach rows that share a tile with
 * it. */
DUALKV_API dualkv_status dualkv_attention_forward(const dualkv_attention_params* params);

typedef struct dualkv_attention_backward_params {
  uint32_t size;
  uint32_t version;
  dualkv_attention_params forward; /* as in the forward call, its out and lse included */
  dualkv_tensor dout;              /* [query_rows, H, D] */
  const void* dlse;                /* [H, query_rows] of the accumulation type, contiguous, or NULL */
  dualkv_tensor dq;                /* [query_rows, H, D] */
  dualkv_tensor dk;                /* [key_rows, Hk, D] */
  dualkv_tensor dv;                /* [key_rows, Hk, D] */
  void* dsinks;                    /* [H] of the accumulation type; NULL if sinks is NULL */
  int32_t deterministic;           /* 1: gradients have the same bits in every run. The CPU's always have, and
                                      dk, dv and dsinks on CUDA */
  int32_t any_plan; /* CUDA: 1: the workspace is to serve every plan that a captured graph may be
                       replayed with, see dualkv_plan_image_bytes */
  void* workspace;  /* workspace_bytes, aligned to 64 */
  size_t workspace_bytes;
} dualkv_attention_backward_params;

/* Bytes of workspace that the backward needs. The pointers in `params` are not read. */
DUALKV_API dualkv_status dualkv_attention_backward_workspace(const dualkv_attention_backward_params* params,
                                                             size_t* bytes);

/* Gradients of q, k, v and sinks; rows that take no part get 0. On the CPU the same bits for any number of
 * threads. On CUDA as dualkv_attention_forward; dout, dq, dk and dv as its tensors, dlse and dsinks aligned
 * to 4 bytes. Some kernels are launched on `stream`, one after the other. The workspace, in device memory,
 * holds dq in fp32; with `deterministic`, counters of 4 bytes for each row and head besides. */
DUALKV_API dualkv_status dualkv_attention_backward(const dualkv_attention_backward_params* params);

/* ---------------------------------------------------------------------------------------------- packing */

typedef struct dualkv_batch dualkv_batch;

/* Groups of token lists. The tokens of all prompts follow each other in prompt_tokens, those of all
 * responses in response_tokens, group by group. Token ids are >= 0. At most 2^30 tokens, and 2^30 groups and
 * responses, in all. Groups without responses and empty responses are kept. */
typedef struct dualkv_pack_params {
  uint32_t size;
  uint32_t version;
  int64_t num_groups;
  const int64_t* prompt_lengths;   /* [num_groups] */
  const int64_t* response_counts;  /* [num_groups] */
  const int64_t* response_lengths; /* [sum of response_counts] */
  const int64_t* prompt_tokens;    /* [sum of prompt_lengths] */
  const int64_t* response_tokens;  /* [sum of response_lengths] */
} dualkv_pack_params;

/* A padded batch as trainers hold it: each row is a prompt and its response. Tokens with attention_mask 0 are
 * padding: dropped wherever they stand, whatever their ids. */
typedef struct dualkv_pack_padded_params {
  uint32_t size;
  uint32_t version;
  int64_t num_rows;              /* B, may be 0 */
  int64_t num_columns;           /* S */
  int64_t response_columns;      /* R, 1 to S (0 to S if B is 0): response_mask is of the last R columns */
  const int64_t* input_ids;      /* [B, S] contiguous */
  const uint8_t* attention_mask; /* [B, S] contiguous, 0 or 1 */
  const uint8_t* response_mask;  /* [B, R] contiguous, 0 or 1: tokens that are scored; 0 on padding */
  const int64_t* group_ids;      /* [B]: rows with the same id share their prompt */
} dualkv_pack_padded_params;

typedef struct dualkv_batch_view {
  uint32_t size;
  uint32_t version;
  int64_t num_groups;
  int64_t num_responses;
  int64_t num_tokens;              /* T */
  int64_t num_targets;             /* M */
  const dualkv_forest* forest;     /* owned by the batch */
  const int64_t* input_ids;        /* [T] */
  const int64_t* position_ids;     /* [T] */
  const int64_t* target_rows;      /* [M] row whose hidden state predicts the target */
  const int64_t* target_ids;       /* [M] the token predicted. Order: groups, responses, tokens */
  const int64_t* response_counts;  /* [num_groups] */
  const int64_t* target_begin;     /* [num_responses + 1] first target of each response */
  const int64_t* source_rows;      /* [num_responses] row of the padded batch */
  const int64_t* source_positions; /* [M] index of the target in the flat response_mask. Both: NULL if
                                      the batch was made by dualkv_pack */
} dualkv_batch_view;

/* Every response token is a target; the prompt's last row predicts the first token of each response. A prompt
 * without tokens is refused if one of its responses has tokens. */
DUALKV_API dualkv_status dualkv_pack(const dualkv_pack_params* params, dualkv_batch** batch);

/* Rows are grouped by id, in the order in which ids first appear; a group's responses keep the order of their
 * rows. The prompts of a group are compared, and a row that differs is refused. If R < S the response starts
 * at the first of the last R columns, else at the row's first column with response_mask 1 (without one the
 * whole row is prompt). Tokens of the response with response_mask 0 are context and no targets. */
DUALKV_API dualkv_status dualkv_pack_padded(const dualkv_pack_padded_params* params, dualkv_batch** batch);
DUALKV_API void dualkv_batch_destroy(dualkv_batch* batch);

/* The pointers in the view are owned by the batch. */
DUALKV_API dualkv_status dualkv_batch_get_view(const dualkv_batch* batch, dualkv_batch_view* view);

/* ----------------------------------------------------------------------------------------- step schedule */

/* What each rank does in a training step: its micro-batches, each a packed batch of parts of groups. */
typedef struct dualkv_step_schedule dualkv_step_schedule;

/* The cost of a micro-batch is token_cost for each of its rows, target_cost for each response token, and
 * pair_cost for each visible pair (dualkv_forest_visible_pairs), in any unit. */
typedef struct dualkv_step_schedule_params {
  uint32_t size;
  uint32_t version;
  int64_t num_groups;
  const int64_t* prompt_lengths;   /* [num_groups], as in dualkv_pack_params */
  const int64_t* response_counts;  /* [num_groups] */
  const int64_t* response_lengths; /* [sum of response_counts] */
  int64_t num_ranks;               /* 1 to 65536 */
  int64_t max_tokens;              /* rows of a micro-batch, >= 1; never exceeded */
  double token_cost;               /* costs are finite and >= 0 */
  double target_cost;
  double pair_cost;
  int32_t equal_samples; /* 1: the ranks' numbers of responses differ by at most one. 0: as costs have it */
  int32_t reserved;
} dualkv_step_schedule_params;

/* Micro-batch k of rank r is entry r * num_micro_batches + k: its parts are part_begin[entry] to
 * part_begin[entry + 1], and the responses of part p are response_begin[p] to response_begin[p + 1]. Each
 * rank's micro-batches are in the order of their costs, highest first, and those without responses last; the
 * parts of a micro-batch are of different groups, in the order of the groups. */
typedef struct dualkv_step_schedule_view {
  uint32_t size;
  uint32_t version;
  int64_t num_ranks;
  int64_t num_micro_batches; /* of each rank */
  int64_t num_parts;
  int64_t num_responses;
  const int64_t* part_begin;     /* [num_ranks * num_micro_batches + 1] */
  const int64_t* groups;         /* [num_parts] */
  const int64_t* response_begin; /* [num_parts + 1] */
  const int64_t* responses;      /* [num_responses] index of a response in its group */
  const int64_t* tokens;         /* [num_ranks * num_micro_batches] rows of each micro-batch */
  const double* costs;           /* [num_ranks * num_micro_batches] */
} dualkv_step_schedule_view;

/* Spreads the responses of groups over ranks and micro-batches, each exactly once. Groups stay whole, except
 * where max_tokens forces a cut, or where the slowest rank gains more by it than the repeated prompt costs
 * it. Every rank has the same number of micro-batches; a rank that has too few, even with one for each group,
 * has fillers at its end: a single part, the shortest prompt, without responses. Without responses there are
 * no micro-batches. A response that does not fit into max_tokens with its prompt is refused. The same input
 * gives the same schedule. */
DUALKV_API dualkv_status dualkv_step_schedule_create(const dualkv_step_schedule_params* params,
                                                     dualkv_step_schedule** schedule);
DUALKV_API void dualkv_step_schedule_destroy(dualkv_step_schedule* schedule);

/* The pointers in the view are owned by the schedule. */
DUALKV_API dualkv_status dualkv_step_schedule_get_view(const dualkv_step_schedule* schedule,
                                                       dualkv_step_schedule_view* view);

/* -------------------------------------------------------------------------------------- linear log-prob */

#define DUALKV_IGNORE_TARGET ((int64_t)-100)

/* logits = hidden[rows[m]] . weight^T + bias, softcapped, divided by the temperature; log-probability of
 * targets[m] and entropy of the distribution, without holding all M x V logits. */
typedef struct dualkv_linear_logprob_params {
  uint32_t size;
  uint32_t version;
  int32_t device;      /* dualkv_device */
  int32_t dtype;       /* dualkv_dtype of hidden, weight, bias and their gradients */
  int32_t num_threads; /* CPU: threads to use; 0 takes one for each core */
  int32_t reserved;
  int64_t hidden_rows; /* T */
  int64_t hidden_dim;  /* C */
  int64_t vocab_size;  /* V */
  int64_t num_targets; /* M */
  const void* hidden;  /* [T, C] */
  int64_t hidden_row_stride;
  const void* weight; /* [V, C] */
  int64_t weight_row_stride;
  const void* bias;       /* [V] contiguous, or NULL */
  const int64_t* rows;    /* [M], 0 to T - 1; rows may repeat */
  const int64_t* targets; /* [M], 0 to V - 1, or DUALKV_IGNORE_TARGET: log-prob and entropy 0 */
  double temperature;     /* finite, > 0 */
  double softcap;         /* c > 0 makes logits c * tanh(logit / c); 0 does not */
  void* logprob;          /* [M] of the accumulation type */
  void* entropy;          /* [M] of the accumulation type, in nats */
  void* lse;              /* [M] of the accumulation type: written by the forward (may be NULL there), read
                             by the backward; 0 for ignored targets */
} dualkv_linear_logprob_params;

DUALKV_API dualkv_status dualkv_linear_logprob_forward(const dualkv_linear_logprob_params* params);

typedef struct dualkv_linear_logprob_backward_params {
  uint32_t size;
  uint32_t version;
  dualkv_linear_logprob_params forward; /* as in the forward call, entropy and lse included */
  const void* dlogprob;                 /* [M] of the accumulation type, or NULL for zeros */
  const void* dentropy;                 /* [M] of the accumulation type, or NULL for zeros */
  void* dhidden;                        /* [T, C] contiguous, or NULL if not wanted */
  void* dweight;                        /* [V, C] contiguous, or NULL if not wanted */
  void* dbias;                          /* [V], or NULL if not wanted */
} dualkv_linear_logprob_backward_params;

/* Gradients; the same bits for any number of threads. */
DUALKV_API dualkv_status dualkv_linear_logprob_backward(const dualkv_linear_logprob_backward_params* params);

/* On CUDA the products are the caller's, who has a library for them. A chunk of logits is that of R rows,
 * each with other hidden states, and of some entries of the vocabulary:
 *
 *   forward    for each chunk: logits = hidden . weight^T (float), dualkv_linear_logprob_chunk_forward
 *   backward   for each chunk: the same logits, dualkv_linear_logprob_chunk_backward, which turns them into
 *              dlogits, then dhidden += dlogits . weight and dweight = dlogits^T . hidden
 *
 * In the forward the chunks of a row come in the order of the vocabulary, from entry 0 to the last. Pointers
 * are to memory of the current device, and what it holds is not checked. One kernel is launched on `stream`;
 * nothing is allocated and nothing is waited for. The same input gives the same bits. */
typedef struct dualkv_linear_logprob_chunk_params {
  uint32_t size;
  uint32_t version;
  int32_t device;            /* DUALKV_CUDA, with compute capability 9.0 */
  int32_t dtype;             /* dualkv_dtype of hidden, weight, bias and dlogits: any but DUALKV_FLOAT64 */
  int64_t num_rows;          /* R */
  int64_t vocab_size;        /* V */
  int64_t vocab_begin;       /* the chunk's first entry of the vocabulary */
  int64_t vocab_count;       /* and how many it has, at most 2^30 */
  float* logits;             /* [R, vocab_count], aligned to 16 bytes. The forward leaves it as it is. Up to 3
                                floats behind each row's last, to a multiple of 4, are read too, and
                                overwritten by the backward */
  int64_t logits_row_stride; /* >= vocab_count, a multiple of 4 */
  const void* bias;          /* [V] contiguous, or NULL */
  double temperature;        /* finite, > 0 */
  double softcap;            /* c > 0 makes logits c * tanh(logit / c); 0 does not */
  const int64_t* target_ranges; /* [R, 2]: for each row the first of its targets in the next two arrays, and
                                   the first that is not one of them any more. A row may have none */
  const int64_t* targets;       /* 0 to V - 1, ascending within a row. Any other has a log-prob of NaN */
  const int64_t* target_index;  /* for each target its m, the place in the arrays [M] that follow */
  float* statistics;            /* [R, 3]: what the forward hands on from one chunk of a row to the next */
  float* logprob;               /* [M]: complete after a row's last chunk; unused by the backward */
  float* entropy;               /* [M]: written by the forward, read by the backward, as lse is */
  float* lse;                   /* [M] */
  void* stream;                 /* the cudaStream_t to launch on, of the current device; NULL: the default */
} dualkv_linear_logprob_chunk_params;

DUALKV_API dualkv_status
dualkv_linear_logprob_chunk_forward(const dualkv_linear_logprob_chunk_params* params);

typedef struct dualkv_linear_logprob_chunk_backward_params {
  uint32_t size;
  uint32_t version;
  dualkv_linear_logprob_chunk_params forward; /* as in the forward call; statistics is unused */
  const float* dlogprob;                      /* [M], or NULL for zeros */
  const float* dentropy;                      /* [M], or NULL for zeros */
} dualkv_linear_logprob_chunk_backward_params;

/* Writes dlogits [R, vocab_count] of dtype in place of the logits: the gradient with respect to the products
 * hidden . weight^T. Row r starts where its logits did. Rows without targets get 0. */
DUALKV_API dualkv_status
dualkv_linear_logprob_chunk_backward(const dualkv_linear_logprob_chunk_backward_params* params);

#ifdef __cplusplus
} /* extern "C" */
#endif

#endif /* DUALKV_DUALKV_H_ */
