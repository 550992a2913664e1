"""Each mistake in a call of dualkv.attention is answered by an error with the argument and the values."""

from __future__ import annotations

import pytest
import torch

import dualkv

FOREST = dualkv.SegmentForest.from_groups([3], [[2, 1]])


def attend(q=None, k=None, v=None, forest=FOREST, rows=6, heads=4, kv_heads=2, dim=8, **options):
    q = torch.randn(rows, heads, dim) if q is None else q
    k = torch.randn(rows, kv_heads, dim) if k is None else k
    return dualkv.attention(q, k, torch.randn_like(k) if v is None else v, forest, **options)


def test_kinds_of_arguments():
    with pytest.raises(TypeError, match="k must be a torch.Tensor, got list"):
        attend(k=[], v=torch.zeros(6, 2, 8))
    with pytest.raises(
        TypeError, match="forest must be a dualkv.SegmentForest or a dualkv.DevicePlan, got Tensor"
    ):
        attend(forest=FOREST.segments)
    with pytest.raises(TypeError, match="sinks must be floating point, got torch.int64"):
        attend(sinks=torch.arange(4))
    with pytest.raises(TypeError, match="sinks must be a torch.Tensor, got list"):
        attend(sinks=[0.0] * 4)
    with pytest.raises(TypeError, match="deterministic must be a bool, got str"):
        attend(deterministic="yes")


def test_shapes():
    with pytest.raises(ValueError, match=r"q must be \[T, H, D\], 3-dimensional, got shape \[1, 6, 4, 8\]"):
        attend(q=torch.zeros(1, 6, 4, 8))
    with pytest.raises(ValueError, match=r"k must be \[T, Hk, D\], 3-dimensional, got shape \[6, 16\]"):
        attend(k=torch.zeros(6, 16))
    with pytest.raises(
        ValueError, match=r"k and v must have the same shape, got \[6, 2, 8\] and \[6, 1, 8\]"
    ):
        attend(v=torch.zeros(6, 1, 8))
    with pytest.raises(ValueError, match="q and k must have the same head dim, got 9 and 8"):
        attend(q=torch.zeros(6, 4, 9))
    with pytest.raises(ValueError, match="heads of q .* multiple .* got 33 and 2"):
        attend(heads=33)
    with pytest.raises(ValueError, match="heads of q .* multiple .* got 4 and 0"):
        attend(kv_heads=0)
    with pytest.raises(ValueError, match="q and k must have the same number of rows, got 7 and 6"):
        attend(q=torch.zeros(7, 4, 8))
    with pytest.raises(ValueError, match=r"sinks must be \[H\], \[4\], got shape \[2\]"):
        attend(sinks=torch.zeros(2))
    with pytest.raises(ValueError, match="head_dim must be 1 to 512, got 513"):
        attend(dim=513)
    with pytest.raises(ValueError, match="head dim of q must be at least 1, got 0"):
        attend(dim=0)


def test_fewer_rows_than_the_forest():
    with pytest.raises(ValueError, match="at least the 6 rows of the forest, got 5"):
        attend(rows=5)


def test_values():
    with pytest.raises(ValueError, match="window_left must be >= 0, or None for no window, got -1"):
        attend(window_left=-1)
    for scale, text in ((float("nan"), "nan"), (float("inf"), "inf")):
        with pytest.raises(ValueError, match=f"scale must be finite, got {text}"):
            attend(scale=scale)
    with pytest.raises(TypeError, match="scale must be a number, got bool"):
        attend(scale=True)
    for softcap, text in ((-1.0, "-1"), (float("nan"), "nan"), (float("inf"), "inf")):
        with pytest.raises(ValueError, match=f"softcap must be finite and >= 0, got {text}"):
            attend(softcap=softcap)


def test_devices():
    with pytest.raises(ValueError, match="q, k, v must be on the same device, got q cpu, k meta, v meta"):
        attend(k=torch.zeros(6, 2, 8, device="meta"))
    with pytest.raises(ValueError, match="same device, got q cpu, k cpu, v cpu, sinks meta"):
        attend(sinks=torch.zeros(4, device="meta"))


def test_segments_given_to_the_operator_itself():
    q, k = torch.zeros(6, 4, 8), torch.zeros(6, 2, 8)
    call = torch.ops.dualkv.attention_forward
    with pytest.raises(ValueError, match=r"segments must be an int64 tensor \[S, 2\], got torch.int32"):
        call(q, k, k, None, FOREST.segments.int(), 1.0, -1, 0.0, 0)
    with pytest.raises(ValueError, match=r"segments must be .* of shape \[6\]"):
        call(q, k, k, None, FOREST.segments.flatten(), 1.0, -1, 0.0, 0)
    with pytest.raises(ValueError, match="preorder"):
        call(q, k, k, None, torch.tensor([[1, -1], [2, -1], [3, 0]]), 1.0, -1, 0.0, 0)
    with pytest.raises(ValueError, match="query_row_begin .* got 4"):
        call(q, k, k, None, FOREST.segments, 1.0, -1, 0.0, 4)
