"""The tensors of a rank without its model: their shapes, their chunks, and checksums that no layout changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from nereus.emu import Emu
from nereus.layout import Layout
from nereus.model.decoder import DecoderShard
from nereus.model.spec import ModelSpec, tensors
from nereus.runtime import unit_sums
from nereus.runtime.transition_orders import UnitKey
from nereus.runtime.unit_tensors import HeldTensors, parameter_shapes
from nereus.staged_state import PREFIXES
from nereus.transition.chunks import chunk_order
from nereus.transition.verify import StateDiffers, combine
from tests.runtime.moving_rank import slices, true_values

SPEC = ModelSpec("qwen3", 50, 24, 5, 6, 3, 4, 48, tie_embeddings=True, qkv_bias=True, mlp_bias=True, qk_norm=True)
SPECS = [SPEC, replace(SPEC, tie_embeddings=False, o_bias=True), replace(SPEC, head="value")]
LAYOUTS = [Layout(1, 1), Layout(2, 1), Layout(3, 1), Layout(1, 3), Layout(3, 2), Layout(2, 5)]
CPU = torch.device("cpu")


class Seat:
    """A rank whose peers are never asked."""

    def __init__(self, layout: Layout, rank: int) -> None:
        self.rank, self.size = layout.tp_rank(rank), layout.tp


def held(spec: ModelSpec, layout: Layout, rank: int, dtype: torch.dtype = torch.float32, trains: bool = True):
    made = HeldTensors(spec, layout, rank, trains=trains, compute_dtype=dtype, device=CPU)
    made.make()
    for part in slices(made):
        made.find(part).copy_(true_values(made, part))
    return made


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("spec", SPECS)
def test_shapes_are_those_of_the_model(spec: ModelSpec, layout: Layout) -> None:
    for rank in range(layout.size):
        shard = DecoderShard(
            spec, layout, rank, group=Seat(layout, rank), dtype=torch.float32, device="meta"  # type: ignore[arg-type]
        )  # fmt: skip
        assert parameter_shapes(spec, layout, rank) == {n: tuple(p.shape) for n, p in shard.named_parameters()}


def test_a_model_is_formed_over_the_very_tensors() -> None:
    layout, made = Layout(2, 1), held(SPEC, Layout(2, 1), 1)
    shard = DecoderShard(
        SPEC,
        layout,
        1,
        group=Seat(layout, 1),  # type: ignore[arg-type]
        dtype=torch.float32,
        device="cpu",
        tensors=made.weights(),
    )
    for name, parameter in shard.named_parameters():
        assert parameter.data_ptr() == made.tensors[""][name].data_ptr() and parameter.requires_grad


@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_are_made_and_freed_one_by_one(layout: Layout) -> None:
    for rank in range(layout.size):
        made = HeldTensors(SPEC, layout, rank, trains=True, compute_dtype=torch.float32, device=CPU)
        for chunk in chunk_order(SPEC, layout, Layout()):
            made.make(chunk)
        assert all(set(group) == set(parameter_shapes(SPEC, layout, rank)) for group in made.tensors.values())
        assert all(made.holds(part) for part in slices(made))
        for chunk in chunk_order(SPEC, layout, Layout()):
            made.free(chunk)
        assert not any(made.tensors.values()) and not any(made.holds(part) for part in slices(made))


def test_what_was_taken_over_outlives_the_old_unit() -> None:
    old = held(SPEC, Layout(2, 1), 0, torch.bfloat16)
    weights = old.weights()
    new = HeldTensors(SPEC, Layout(2, 1), 0, trains=True, compute_dtype=torch.bfloat16, device=CPU)
    new.take_over(old)
    old.free()
    assert new.weights() == weights and all(weights[n].dtype == torch.bfloat16 for n in weights)
    assert all(torch.equal(new.find(part), true_values(new, part).float()) for part in slices(new))


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("trains", [True, False])
@pytest.mark.parametrize("block_bytes", [64, 1 << 20])
def test_sums_are_the_same_on_every_layout(
    spec: ModelSpec, trains: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(unit_sums, "_HASH_BLOCK_BYTES", block_bytes)
    found = []
    for layout in LAYOUTS:
        unit, results = counted(spec, layout, trains)
        found.append(combine(results, [unit], {unit.model_stage: spec}))
    assert all(sums == found[0] for sums in found)
    (sums,) = found[0].values()
    prefixes = PREFIXES if trains else ("",)
    assert list(sums) == [p + n for n in tensors(spec) for p in prefixes]
    assert len(set(sums.values())) == len(sums)


def counted(spec: ModelSpec, layout: Layout, trains: bool, spoil: tuple[int, str] | None = None):
    name = "actor.training" if trains else "actor.generation"
    unit = Emu(name, 0, layout, tuple(range(layout.size)))
    results = {}
    for rank in range(layout.size):
        made = held(spec, layout, rank, trains=trains)
        if spoil is not None and rank == spoil[0]:
            made.tensors["exp_avg/"][spoil[1]].view(-1)[-1] += 1
        results[rank] = {UnitKey.of(unit): made.sums()}
    return unit, results


@pytest.mark.parametrize(
    ("layout", "rank", "parameter"),
    [(Layout(2, 1), 1, "layers.0.input_norm.weight"), (Layout(1, 2), 1, "embed.weight")],
    ids=["equal on tp ranks", "tied"],
)
def test_holders_that_differ_are_named(layout: Layout, rank: int, parameter: str) -> None:
    unit, results = counted(SPEC, layout, True, (rank, parameter))
    with pytest.raises(StateDiffers, match="exp_avg/model"):
        combine(results, [unit], {unit.model_stage: SPEC})


def test_one_element_that_differs_changes_its_sum_only() -> None:
    layout = Layout(3, 1)
    sums = []
    for spoil in (None, (2, "layers.1.mlp.down.weight")):
        unit, results = counted(SPEC, layout, True, spoil)
        sums.append(combine(results, [unit], {unit.model_stage: SPEC})[unit.model_stage])
    assert {n for n in sums[0] if sums[0][n] != sums[1][n]} == {"exp_avg/model.layers.1.mlp.down_proj.weight"}
