"""Rotary position embedding, with the formulas and the order of operations of Hugging Face's Llama."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from nereus.model.spec import ModelSpec, RopeScaling


def lifted(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which delicate math is done: at least float32, and float64 stays float64."""
    return torch.promote_types(dtype, torch.float32)


def compute_frequencies(spec: ModelSpec, dtype: torch.dtype) -> Tensor:
    """Return the [head_dim / 2] angular frequencies in `dtype` (float32 or float64)."""
    exponents = torch.arange(0, spec.head_dim, 2, dtype=dtype) / spec.head_dim
    frequencies = 1.0 / (spec.rope_theta**exponents)
    return frequencies if spec.rope_scaling is None else _scale_llama3(frequencies, spec.rope_scaling)


def _scale_llama3(frequencies: Tensor, scaling: RopeScaling) -> Tensor:
    """Stretch low frequencies, keep high ones, blend between (`_compute_llama3_parameters` of transformers)."""
    wavelength = 2 * math.pi / frequencies
    longest = scaling.original_max_position / scaling.low_freq_factor
    shortest = scaling.original_max_position / scaling.high_freq_factor
    blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
        scaling.high_freq_factor - scaling.low_freq_factor
    )
    stretched = torch.where(wavelength > longest, frequencies / scaling.factor, frequencies)
    blended = (1 - blend) * stretched / scaling.factor + blend * stretched
    medium = ~(wavelength < shortest) & ~(wavelength > longest)
    return torch.where(medium, blended, stretched)


class RotaryTable:
    """Cosines and sines by position; grown when a longer sequence comes, then gathered once per forward."""

    def __init__(self, spec: ModelSpec, dtype: torch.dtype, device: torch.device | str) -> None:
        self._spec = spec
        self._dtype = lifted(dtype)
        self._device = device
        self._table = torch.empty(2, 0, spec.head_dim)

    def _grow(self, num_positions: int) -> None:
        frequencies = compute_frequencies(self._spec, self._dtype)
        angles = torch.arange(num_positions, dtype=self._dtype)[:, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        self._table = torch.stack((torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1))).to(self._device)

    def gather(self, positions: Tensor, num_positions: int) -> tuple[Tensor, Tensor]:
        """Return (cos, sin) as `rotate_` takes them, for `positions` [N], all below `num_positions`."""
        if self._table.shape[1] < num_positions:
            self._grow(max(256, 2 * num_positions))
        cos, sin = self._table.index_select(1, positions).unsqueeze(2)
        return cos, sin


def rotate_(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate x [N, heads, head_dim] by the angles of its positions, in place; math in the dtype of `cos`.

    The halves of a head are the two coordinates of its planes, as in Hugging Face's `rotate_half`.

    Args:
        cos: [N, 1, head_dim], both halves alike.
        sin: [N, 1, head_dim], its first half negated: what multiplies the other half.
    """
    high = x.to(cos.dtype)
    swapped = high.roll(x.shape[-1] // 2, -1)
    if high is x:
        return x.mul_(cos).addcmul_(swapped, sin)
    return x.copy_(high.mul_(cos).addcmul_(swapped, sin))


class _Rotate(torch.autograd.Function):
    """Rotation of the leading heads of a tensor; its gradient is the rotation back, so nothing is saved but angles."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.num_heads = num_heads
        x = x.clone()
        rotate_(x[:, :num_heads], cos, sin)
        return x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grad.clone()
        rotate_(grad[:, : ctx.num_heads], cos, -sin)
        return grad, None, None, None


def rotate(x: Tensor, num_heads: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first `num_heads` heads of x [N, heads, head_dim]; x may be overwritten."""
    if torch.is_grad_enabled() and x.requires_grad:
        return _Rotate.apply(x, num_heads, cos, sin)  # type: ignore[no-any-return]
    rotate_(x[:, :num_heads], cos, sin)
    return x
