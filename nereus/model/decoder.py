"""What one rank holds of a decoder, and its forward passes: packed, prefill and one decoding step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from nereus.layout import Layout, check_layout, partition, slices_of, stage_layers
from nereus.model.attention import decode_mask
from nereus.model.batch import PackedBatch
from nereus.model.group import Group
from nereus.model.kv_cache import KvCache
from nereus.model.layers import DecoderLayer, Linear, Pass, Place, RmsNorm, VocabEmbedding
from nereus.model.layers_decode import DecodeLayer, Step
from nereus.model.linear import Product, linear, make_product
from nereus.model.rotary import RotaryTable, lifted
from nereus.model.spec import ModelSpec
from storage.slices import TensorSlice

# Canonical name inside a layer -> (parameter, place among the parts fused into it).
_LAYER_PARAMETERS = {
    "input_layernorm": ("input_norm", 0),
    "self_attn.q_proj": ("attention.qkv", 0),
    "self_attn.k_proj": ("attention.qkv", 1),
    "self_attn.v_proj": ("attention.qkv", 2),
    "self_attn.o_proj": ("attention.o", 0),
    "self_attn.q_norm": ("attention.q_norm", 0),
    "self_attn.k_norm": ("attention.k_norm", 0),
    "post_attention_layernorm": ("post_norm", 0),
    "mlp.gate_proj": ("mlp.gate_up", 0),
    "mlp.up_proj": ("mlp.gate_up", 1),
    "mlp.down_proj": ("mlp.down", 0),
}
_OTHER_PARAMETERS = {
    "model.embed_tokens.weight": "embed.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "value_head.weight": "head.weight",
    "score.weight": "head.weight",
}


@dataclass(frozen=True)
class ShardView:
    """A canonical slice and where it lies: rows [start, start + rows) of a parameter of the shard."""

    slice: TensorSlice
    parameter: str
    start: int
    rows: int

    def of(self, tensor: Tensor) -> Tensor:
        """Return the slice inside any tensor shaped like the parameter (weights, gradients, moments)."""
        return tensor.narrow(0, self.start, self.rows)


class _Recompute(torch.autograd.Function):
    """A layer of which only the input is kept; it runs again in the backward pass.

    `torch.utils.checkpoint` does the same and loads the compiler's modules on first use, some 70 MiB in every worker.
    """

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, layer: nn.Module, run: Pass) -> Tensor:
        ctx.save_for_backward(hidden)
        ctx.rest = (layer, run)
        return layer(hidden, run)  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        (hidden,) = ctx.saved_tensors
        layer, run = ctx.rest
        hidden = hidden.detach().requires_grad_()
        with torch.enable_grad():
            again = layer(hidden, run)
        torch.autograd.backward(again, grad)  # the layer's own gradients end where autograd would have put them
        return hidden.grad, None, None


class DecoderShard(nn.Module):
    """The layers, embedding and head that rank `rank` of a (tp, pp) layout holds; parameters are uninitialised."""

    def __init__(
        self,
        spec: ModelSpec,
        layout: Layout,
        rank: int,
        *,
        group: Group,
        dtype: torch.dtype,
        device: torch.device | str,
        tensors: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Make the rank's modules.

        Args:
            tensors: the parameters' memory by name, taken as it is; without it new memory is made.
        """
        super().__init__()
        check_layout(spec, layout)
        assert group.size == layout.tp and group.rank == layout.tp_rank(rank), (layout, rank, group.rank, group.size)
        self.spec, self.layout, self.rank, self.group, self.dtype = spec, layout, rank, group, dtype
        stage = layout.stage(rank)
        self.is_first, self.is_last = stage == 0, stage == layout.pp - 1
        self.vocab_range = partition(spec.vocab, layout.tp)[layout.tp_rank(rank)]
        place = Place(layout.tp_rank(rank), layout.tp, group, dtype, device if tensors is None else "meta")
        if self.is_first or (self.is_last and spec.ties_head):
            self.embed = VocabEmbedding(spec, place)
        numbers = stage_layers(spec, layout, stage)
        self.layers = nn.ModuleDict({str(n): DecoderLayer(spec, i, place) for i, n in enumerate(numbers)})
        if self.is_last:
            self.norm = RmsNorm(spec.hidden, spec.rms_eps, place)
            if not spec.ties_head:
                rows = {"lm": place.share(spec.vocab), "value": 1, "score": spec.num_labels}[spec.head]
                self.head = Linear(rows, spec.hidden, False, place)
        for name, tensor in (tensors or {}).items():
            module, _, leaf = name.rpartition(".")
            setattr(self.get_submodule(module), leaf, nn.Parameter(tensor))
        self._rotary = RotaryTable(spec, dtype, device)
        self._prepared: list[DecodeLayer] = []
        self._prepared_head: Product | None = None

    @property
    def head_weight(self) -> nn.Parameter:
        """The head's matrix on the last stage: [V_local, hidden], [1, hidden] or [num_labels, hidden]."""
        return self.embed.weight if self.spec.ties_head else self.head.weight

    @property
    def tied_embedding(self) -> nn.Parameter | None:
        """The embedding that first and last stage both hold, whose gradients are summed over the two; else None."""
        shared = self.spec.ties_head and self.layout.pp > 1 and (self.is_first or self.is_last)
        return self.embed.weight if shared else None

    @property
    def tp_summed(self) -> list[nn.Parameter]:
        """Parameters whose gradients are sums over the tp ranks."""
        return [p for name, p in self.named_parameters() if ".q_norm." in name or ".k_norm." in name]

    def forward(
        self,
        x: Tensor,
        batch: PackedBatch,
        *,
        recompute: bool = False,
        cache: KvCache | None = None,
        slots: Sequence[int] | None = None,
    ) -> Tensor:
        """Return hidden states [N, hidden] of a packed batch; on the last stage after the final norm.

        Args:
            x: token ids [N] int64 on the first stage, hidden states [N, hidden] on later ones.
            recompute: keep only the layers' inputs and run each layer again in the backward pass.
            cache, slots: also write K and V of sequence i into slot slots[i], positions 0..length-1 (prefill).
        """
        cos, sin = self._rotary.gather(batch.positions, max(batch.lengths))
        rows = None
        if cache is not None:
            assert slots is not None and len(slots) == len(batch.lengths), (slots, batch.lengths)
            assert not torch.is_grad_enabled(), "prefill has no gradient"
            repeats = torch.tensor(batch.lengths, device=batch.positions.device)
            owners = torch.tensor(slots, device=batch.positions.device).repeat_interleave(repeats)
            rows = cache.rows(owners, batch.positions)
        run = Pass(batch, cos, sin, cache, rows)
        hidden = self.embed(x) if self.is_first else x
        for layer in self.layers.values():
            if recompute and torch.is_grad_enabled():
                hidden = _Recompute.apply(hidden, layer, run)  # type: ignore[assignment]
            else:
                hidden = layer(hidden, run)
        return self.norm(hidden) if self.is_last else hidden

    @torch.no_grad()
    def decode(self, x: Tensor, positions: Tensor, cache: KvCache) -> Tensor:
        """Return hidden states [n, hidden] of one new token for each of the first n slots.

        Args:
            x: token ids [n] on the first stage, hidden states [n, hidden] on later ones.
            positions: [n] int64, where each token goes; it sees positions 0..positions[i] of its slot.
        """
        length = int(positions.max()) + 1
        cos, sin = self._rotary.gather(positions, length)
        rows = cache.rows(torch.arange(len(positions), device=positions.device), positions)
        mask = decode_mask(positions, length, self.dtype, self.spec.sliding_window)
        step = Step(cache, cache.window(len(positions), length), rows, cos, sin, mask)
        hidden = self.embed(x) if self.is_first else x
        for layer in self._prepared or self._decode_layers(packed=False):
            hidden = layer(hidden, step)
        return self.norm(hidden) if self.is_last else hidden

    def _decode_layers(self, *, packed: bool) -> list[DecodeLayer]:
        return [DecodeLayer(layer, packed=packed) for layer in self.layers.values()]  # type: ignore[arg-type]

    def logits(self, hidden: Tensor) -> Tensor:
        """Return this rank's vocabulary logits [M, V_local] of hidden [M, hidden]."""
        if self._prepared_head is not None and not torch.is_grad_enabled():
            return self._prepared_head(hidden)
        return linear(hidden, self.head_weight)

    def values(self, hidden: Tensor) -> Tensor:
        """Return one value a row, [M], in at least float32; hidden [M, hidden]."""
        assert self.spec.head == "value"
        return self.scores(hidden)[:, 0]

    def scores(self, hidden: Tensor) -> Tensor:
        """Return [M, num_labels] in at least float32; hidden [M, hidden]."""
        high = lifted(hidden.dtype)
        return linear(hidden.to(high), self.head_weight.to(high))

    def views(self) -> tuple[ShardView, ...]:
        """Return where each canonical slice of this rank lies; exactly `slices_of(spec, layout, rank)`, in order."""
        return shard_views(self.spec, self.layout, self.rank)

    def prepare_decode(self) -> None:
        """Copy the matrices into the order that decoding reads fastest; call it whenever they have changed.

        The copies take as many bytes as the matrices of layers and head. A matrix for which packing doesn't pay
        (`nereus.model.linear.packing_pays`) is shared, not copied.
        """
        self._prepared = self._decode_layers(packed=True)
        if self.is_last:
            self._prepared_head = make_product(self.head_weight.detach(), None, packed=True)

    def drop_prepared(self) -> None:
        """Free what `prepare_decode` copied."""
        self._prepared, self._prepared_head = [], None


@lru_cache(maxsize=1024)
def shard_views(spec: ModelSpec, layout: Layout, rank: int) -> tuple[ShardView, ...]:
    """Return where each canonical slice of a rank lies in its parameters, in the order of `slices_of`."""
    slices = slices_of(spec, layout, rank)
    places = [_parameter_of(part.name) for part in slices]
    rows: dict[tuple[str, int], int] = {place: part.sizes[0] for place, part in zip(places, slices, strict=True)}
    views = []
    for part, (parameter, index) in zip(slices, places, strict=True):
        start = sum(rows[parameter, before] for before in range(index))
        views.append(ShardView(part, parameter, start, part.sizes[0]))
    return tuple(views)


def _parameter_of(name: str) -> tuple[str, int]:
    """Return the parameter that holds a canonical tensor and the tensor's place among the parts fused into it."""
    if name in _OTHER_PARAMETERS:
        return _OTHER_PARAMETERS[name], 0
    number, _, rest = name.removeprefix("model.layers.").partition(".")
    module, _, kind = rest.rpartition(".")
    parameter, index = _LAYER_PARAMETERS[module]
    return f"layers.{number}.{parameter}.{kind}", index
