"""The C interface, include/dualkv/dualkv.h, in ctypes: constants, structs and functions under their C names.

Every pointer to data is a plain address (c_void_p), so that Tensor.data_ptr() can be assigned to it.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_double, c_int32, c_int64, c_size_t, c_uint32, c_void_p

ABI_VERSION = 1

# dualkv_status
OK = 0
INVALID_ARGUMENT = 1
UNSUPPORTED = 2
OUT_OF_MEMORY = 3
INTERNAL = 4

NO_WINDOW = -1
IGNORE_TARGET = -100

# dualkv_dtype
FLOAT64 = 0
FLOAT32 = 1
BFLOAT16 = 2
FLOAT16 = 3

# dualkv_device
CPU = 0
CUDA = 1


class VersionedStructure(Structure):
    """A struct that starts with its size and the version of the interface, both filled in here."""

    _fields_ = [("size", c_uint32), ("version", c_uint32)]

    def __init__(self, **fields):
        super().__init__(size=ctypes.sizeof(self), version=ABI_VERSION, **fields)


class dualkv_segment(Structure):
    _fields_ = [
        ("begin", c_int32),
        ("end", c_int32),
        ("tree_end", c_int32),
        ("position", c_int32),
        ("parent", c_int32),
    ]


class dualkv_forest_view(VersionedStructure):
    _fields_ = [
        ("num_segments", c_int64),
        ("total_tokens", c_int64),
        ("segments", c_void_p),
    ]


class dualkv_plan_params(VersionedStructure):
    _fields_ = [
        ("forest", c_void_p),
        ("window_left", c_int64),
        ("keys_only", c_void_p),
        ("forward_query_tile", c_int32),
        ("forward_key_tile", c_int32),
        ("backward_query_tile", c_int32),
        ("backward_key_tile", c_int32),
        ("backward_parts", c_int32),
        ("reserved", c_int32),
    ]


class dualkv_tile(Structure):
    _fields_ = [
        ("begin", c_int32),
        ("end", c_int32),
        ("run_begin", c_int32),
        ("run_end", c_int32),
    ]


class dualkv_run(Structure):
    _fields_ = [
        ("begin", c_int32),
        ("end", c_int32),
        ("segment", c_int32),
        ("masked", c_int32),
    ]


class dualkv_schedule(Structure):
    _fields_ = [
        ("query_tile", c_int32),
        ("key_tile", c_int32),
        ("num_tiles", c_int64),
        ("num_runs", c_int64),
        ("tiles", c_void_p),
        ("runs", c_void_p),
    ]


class dualkv_plan_view(VersionedStructure):
    _fields_ = [
        ("window_left", c_int64),
        ("num_segments", c_int64),
        ("total_tokens", c_int64),
        ("segments", c_void_p),
        ("positions", c_void_p),
        ("forward", dualkv_schedule),
        ("backward", dualkv_schedule),
        ("num_query_tiles", c_int64),
        ("first_query_tile", c_void_p),
        ("turn", c_void_p),
        ("num_partials", c_int64),
        ("partial", c_void_p),
        ("band", c_void_p),
    ]


class dualkv_tensor(Structure):
    _fields_ = [
        ("data", c_void_p),
        ("row_stride", c_int64),
        ("head_stride", c_int64),
    ]


class dualkv_attention_params(VersionedStructure):
    _fields_ = [
        ("device", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("num_heads", c_int32),
        ("num_kv_heads", c_int32),
        ("head_dim", c_int32),
        ("plan", c_void_p),
        ("query_rows", c_int64),
        ("query_row_begin", c_int64),
        ("key_rows", c_int64),
        ("scale", c_double),
        ("softcap", c_double),
        ("q", dualkv_tensor),
        ("k", dualkv_tensor),
        ("v", dualkv_tensor),
        ("sinks", c_void_p),
        ("out", dualkv_tensor),
        ("lse", c_void_p),
        ("device_plan", c_void_p),
        ("device_plan_bytes", c_size_t),
        ("stream", c_void_p),
    ]


class dualkv_attention_backward_params(VersionedStructure):
    _fields_ = [
        ("forward", dualkv_attention_params),
        ("dout", dualkv_tensor),
        ("dlse", c_void_p),
        ("dq", dualkv_tensor),
        ("dk", dualkv_tensor),
        ("dv", dualkv_tensor),
        ("dsinks", c_void_p),
        ("deterministic", c_int32),
        ("any_plan", c_int32),
        ("workspace", c_void_p),
        ("workspace_bytes", c_size_t),
    ]


class dualkv_pack_params(VersionedStructure):
    _fields_ = [
        ("num_groups", c_int64),
        ("prompt_lengths", c_void_p),
        ("response_counts", c_void_p),
        ("response_lengths", c_void_p),
        ("prompt_tokens", c_void_p),
        ("response_tokens", c_void_p),
    ]


class dualkv_pack_padded_params(VersionedStructure):
    _fields_ = [
        ("num_rows", c_int64),
        ("num_columns", c_int64),
        ("response_columns", c_int64),
        ("input_ids", c_void_p),
        ("attention_mask", c_void_p),
        ("response_mask", c_void_p),
        ("group_ids", c_void_p),
    ]


class dualkv_batch_view(VersionedStructure):
    _fields_ = [
        ("num_groups", c_int64),
        ("num_responses", c_int64),
        ("num_tokens", c_int64),
        ("num_targets", c_int64),
        ("forest", c_void_p),
        ("input_ids", c_void_p),
        ("position_ids", c_void_p),
        ("target_rows", c_void_p),
        ("target_ids", c_void_p),
        ("response_counts", c_void_p),
        ("target_begin", c_void_p),
        ("source_rows", c_void_p),
        ("source_positions", c_void_p),
    ]


class dualkv_step_schedule_params(VersionedStructure):
    _fields_ = [
        ("num_groups", c_int64),
        ("prompt_lengths", c_void_p),
        ("response_counts", c_void_p),
        ("response_lengths", c_void_p),
        ("num_ranks", c_int64),
        ("max_tokens", c_int64),
        ("token_cost", c_double),
        ("target_cost", c_double),
        ("pair_cost", c_double),
        ("equal_samples", c_int32),
        ("reserved", c_int32),
    ]


class dualkv_step_schedule_view(VersionedStructure):
    _fields_ = [
        ("num_ranks", c_int64),
        ("num_micro_batches", c_int64),
        ("num_parts", c_int64),
        ("num_responses", c_int64),
        ("part_begin", c_void_p),
        ("groups", c_void_p),
        ("response_begin", c_void_p),
        ("responses", c_void_p),
        ("tokens", c_void_p),
        ("costs", c_void_p),
    ]


class dualkv_linear_logprob_params(VersionedStructure):
    _fields_ = [
        ("device", c_int32),
        ("dtype", c_int32),
        ("num_threads", c_int32),
        ("reserved", c_int32),
        ("hidden_rows", c_int64),
        ("hidden_dim", c_int64),
        ("vocab_size", c_int64),
        ("num_targets", c_int64),
        ("hidden", c_void_p),
        ("hidden_row_stride", c_int64),
        ("weight", c_void_p),
        ("weight_row_stride", c_int64),
        ("bias", c_void_p),
        ("rows", c_void_p),
        ("targets", c_void_p),
        ("temperature", c_double),
        ("softcap", c_double),
        ("logprob", c_void_p),
        ("entropy", c_void_p),
        ("lse", c_void_p),
    ]


class dualkv_linear_logprob_backward_params(VersionedStructure):
    _fields_ = [
        ("forward", dualkv_linear_logprob_params),
        ("dlogprob", c_void_p),
        ("dentropy", c_void_p),
        ("dhidden", c_void_p),
        ("dweight", c_void_p),
        ("dbias", c_void_p),
    ]


class dualkv_linear_logprob_chunk_params(VersionedStructure):
    _fields_ = [
        ("device", c_int32),
        ("dtype", c_int32),
        ("num_rows", c_int64),
        ("vocab_size", c_int64),
        ("vocab_begin", c_int64),
        ("vocab_count", c_int64),
        ("logits", c_void_p),
        ("logits_row_stride", c_int64),
        ("bias", c_void_p),
        ("temperature", c_double),
        ("softcap", c_double),
        ("target_ranges", c_void_p),
        ("targets", c_void_p),
        ("target_index", c_void_p),
        ("statistics", c_void_p),
        ("logprob", c_void_p),
        ("entropy", c_void_p),
        ("lse", c_void_p),
        ("stream", c_void_p),
    ]


class dualkv_linear_logprob_chunk_backward_params(VersionedStructure):
    _fields_ = [
        ("forward", dualkv_linear_logprob_chunk_params),
        ("dlogprob", c_void_p),
        ("dentropy", c_void_p),
    ]


class Status:
    """The result type dualkv_status; _library.py checks it after every call."""


_HANDLE_OUT = POINTER(c_void_p)

# name: (result, arguments)
FUNCTIONS = {
    "dualkv_last_error": (c_char_p, []),
    "dualkv_version": (c_char_p, []),
    "dualkv_abi_version": (c_uint32, []),
    "dualkv_cpu_target": (c_char_p, []),
    "dualkv_forest_create": (Status, [c_int64, c_void_p, c_void_p, _HANDLE_OUT]),
    "dualkv_forest_create_from_groups": (Status, [c_int64, c_void_p, c_void_p, c_void_p, _HANDLE_OUT]),
    "dualkv_forest_destroy": (None, [c_void_p]),
    "dualkv_forest_get_view": (Status, [c_void_p, POINTER(dualkv_forest_view)]),
    "dualkv_forest_position_ids": (Status, [c_void_p, c_void_p]),
    "dualkv_forest_visible_pairs": (Status, [c_void_p, c_int64, POINTER(c_int64)]),
    "dualkv_plan_create": (Status, [POINTER(dualkv_plan_params), _HANDLE_OUT]),
    "dualkv_plan_destroy": (None, [c_void_p]),
    "dualkv_plan_get_view": (Status, [c_void_p, POINTER(dualkv_plan_view)]),
    "dualkv_plan_set_tiles": (Status, [POINTER(dualkv_plan_params), c_int32, c_int32, c_int32, c_int32]),
    "dualkv_plan_image_bytes": (Status, [c_void_p, POINTER(c_size_t)]),
    "dualkv_plan_write_image": (Status, [c_void_p, c_void_p, c_size_t]),
    "dualkv_attention_forward": (Status, [POINTER(dualkv_attention_params)]),
    "dualkv_attention_backward_workspace": (
        Status,
        [POINTER(dualkv_attention_backward_params), POINTER(c_size_t)],
    ),
    "dualkv_attention_backward": (Status, [POINTER(dualkv_attention_backward_params)]),
    "dualkv_pack": (Status, [POINTER(dualkv_pack_params), _HANDLE_OUT]),
    "dualkv_pack_padded": (Status, [POINTER(dualkv_pack_padded_params), _HANDLE_OUT]),
    "dualkv_batch_destroy": (None, [c_void_p]),
    "dualkv_batch_get_view": (Status, [c_void_p, POINTER(dualkv_batch_view)]),
    "dualkv_step_schedule_create": (Status, [POINTER(dualkv_step_schedule_params), _HANDLE_OUT]),
    "dualkv_step_schedule_destroy": (None, [c_void_p]),
    "dualkv_step_schedule_get_view": (Status, [c_void_p, POINTER(dualkv_step_schedule_view)]),
    "dualkv_linear_logprob_forward": (Status, [POINTER(dualkv_linear_logprob_params)]),
    "dualkv_linear_logprob_backward": (Status, [POINTER(dualkv_linear_logprob_backward_params)]),
    "dualkv_linear_logprob_chunk_forward": (Status, [POINTER(dualkv_linear_logprob_chunk_params)]),
    "dualkv_linear_logprob_chunk_backward": (Status, [POINTER(dualkv_linear_logprob_chunk_backward_params)]),
}
