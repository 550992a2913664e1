"""Gradients of the operators, which have none themselves."""

from __future__ import annotations

import torch


def gradients_of(function: str, *arguments) -> tuple[torch.Tensor, ...]:
    """What torch.ops.dualkv.<function>_backward returns, for the backward of an autograd function. Asking for a
    second derivative raises."""
    # Gradients are enabled there only if there is to be a graph of the gradients, too.
    if torch.is_grad_enabled():
        return _Gradients.apply(function, *arguments)
    return _operator(function)(*arguments)


def _operator(function: str):
    return getattr(torch.ops.dualkv, f"{function}_backward")


class _Gradients(torch.autograd.Function):
    @staticmethod
    def forward(ctx, function, *arguments):
        ctx.function = function
        return _operator(function)(*arguments)

    @staticmethod
    def backward(ctx, *gradients):
        raise RuntimeError(f"dualkv.{ctx.function} can be differentiated once, not twice")
