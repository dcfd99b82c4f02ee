"""The grid, who writes what, and what is read: every element once, whole pieces only, on any pair of layouts."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.layout import Layout, slices_of, tensor_slices
from nereus.model.spec import ModelSpec, tensors
from nereus.plan import Plan, StagePlan
from nereus.staged_state import STAGED, base_name, grid, plan_shards, staged_shapes, wanted_slices
from storage.slices import TensorSlice

ODD = ModelSpec("llama", vocab=29, hidden=64, layers=5, heads=8, kv_heads=4, head_dim=8, intermediate=50)
TIED = replace(ODD, family="qwen3", tie_embeddings=True, qk_norm=True, qkv_bias=True, o_bias=True, mlp_bias=True)
SMOLLM2 = ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1_536, tie_embeddings=True)


def specs_of(spec: ModelSpec) -> dict[str, ModelSpec]:
    return {"actor.training": spec, "critic.training": replace(spec, head="value")}


def plan_of(actor: tuple[int, int, int], critic: tuple[int, int, int], shift: int = 0) -> Plan:
    """Return a plan of (dp, tp, pp) each, the critic's devices `shift` later than the actor's."""
    stages = {}
    for name, (dp, tp, pp), first in zip(STAGED, (actor, critic), (0, shift), strict=True):
        stages[name] = StagePlan(dp, Layout(tp, pp), tuple(range(first, first + dp * tp * pp)), 1)
    return Plan.of(stages)


def test_the_grid_by_hand() -> None:
    infos = tensors(ODD)
    rows = grid(infos["model.layers.0.self_attn.q_proj.weight"], 4)  # 4 groups of 16 rows; tp 3 has 2 + 1 + 1 of them
    assert [(piece.starts, piece.sizes) for piece in rows] == [((16 * i, 0), (16, 64)) for i in range(4)]
    columns = grid(infos["model.layers.0.mlp.down_proj.weight"], 4)  # 50 columns: 25; 17, 34; 13, 26, 38
    assert [piece.starts[1] for piece in columns] == [0, 13, 17, 25, 26, 34, 38]
    assert {piece.sizes[0] for piece in columns} == {64}
    assert grid(infos["model.norm.weight"], 4) == (TensorSlice("model.norm.weight", (0,), (64,)),)


@pytest.mark.parametrize("spec", [ODD, TIED, SMOLLM2, replace(ODD, kv_heads=8, intermediate=3)], ids=range(4))
def test_every_slice_of_every_layout_is_made_of_whole_pieces(spec: ModelSpec) -> None:
    for info in tensors(spec).values():
        pieces = grid(info, spec.kv_heads)
        assert sum(piece.num_elements for piece in pieces) == np.prod(info.shape)
        for tp in range(1, spec.kv_heads + 1):
            for part in tensor_slices(info, tp):
                touched = [piece for piece in pieces if piece.intersect(part)]
                assert sum(piece.num_elements for piece in touched) == part.num_elements


layouts = st.sampled_from([d for d in itertools.product(range(1, 5), repeat=3) if d[0] * d[1] * d[2] <= 16])


@settings(max_examples=25, deadline=None)
@given(st.sampled_from([ODD, TIED]), layouts, layouts, st.integers(0, 5), st.sampled_from([600, 5000, 1 << 26]))
def test_each_element_is_written_once_by_a_device_that_holds_it(spec, actor, critic, shift, max_shard_bytes) -> None:
    plan, specs = plan_of(actor, critic, shift), specs_of(spec)
    orders = plan_shards(plan, specs, element_bytes=4, max_shard_bytes=max_shard_bytes)
    files = [order.file for mine in orders.values() for order in mine]
    assert len(set(files)) == len(files)
    for group in STAGED:
        counts = {name: np.zeros(shape, dtype=np.int64) for name, shape in staged_shapes(specs[group]).items()}
        for device, mine in orders.items():
            for order in (order for order in mine if order.group == group):
                assert order.device == device and order.num_bytes == 4 * sum(p.num_elements for p in order.pieces)
                assert order.num_bytes <= max_shard_bytes or len(order.pieces) == 1
                held = held_by(plan, specs, group, device)
                for piece in order.pieces:
                    plain = replace(piece, name=base_name(piece.name))
                    assert any(plain.intersect(part) == plain for part in held)
                    counts[piece.name][tuple(map(slice, piece.starts, piece.stops))] += 1
        assert all((count == 1).all() for count in counts.values())


def held_by(plan: Plan, specs: dict[str, ModelSpec], group: str, device: int) -> list[TensorSlice]:
    stage = plan[group]
    rank = stage.devices.index(device) % stage.layout.size
    return list(slices_of(specs[group], stage.layout, rank))


@pytest.mark.parametrize("layout", [(2, 1, 1), (4, 1, 1), (2, 1, 2), (2, 2, 2)], ids=lambda d: "x".join(map(str, d)))
def test_replicas_write_equal_shares(layout: tuple[int, int, int]) -> None:
    plan, specs = plan_of(layout, layout), specs_of(SMOLLM2)
    orders = plan_shards(plan, specs, element_bytes=4)
    loads = {device: sum(order.num_bytes for order in orders[device]) for device in plan.devices}
    largest_piece = 4 * 49_152 * 576 // 3  # a third of the embedding
    for devices in zip(*plan["actor.training"].replicas, strict=True):
        assert max(loads[device] for device in devices) - min(loads[device] for device in devices) <= largest_piece
    assert sum(loads.values()) == sum(4 * int(np.prod(s)) for g in STAGED for s in staged_shapes(specs[g]).values())


def test_what_two_stages_hold_is_written_by_the_one_with_less_to_write() -> None:
    """The last stage of a tied model has the embedding too; the critic's lies on the first one only."""
    plan, specs = plan_of((1, 1, 2), (1, 1, 2)), specs_of(replace(SMOLLM2, layers=2))
    orders = plan_shards(plan, specs, element_bytes=4)
    embedding = 4 * 49_152 * 576
    loads = [sum(order.num_bytes for order in orders[device]) for device in (0, 1)]
    assert abs(loads[0] - loads[1]) < embedding // 2


def test_the_shares_are_the_same_every_time() -> None:
    plan, specs = plan_of((2, 2, 1), (4, 1, 1)), specs_of(TIED)
    assert plan_shards(plan, specs, element_bytes=8) == plan_shards(plan, dict(specs), element_bytes=8)


@given(layouts)
def test_a_rank_reads_what_it_holds_of_parameters_and_moments(layout: tuple[int, int, int]) -> None:
    _, tp, pp = layout
    for rank in range(tp * pp):
        wanted = wanted_slices(ODD, Layout(tp, pp), rank)
        held = slices_of(ODD, Layout(tp, pp), rank)
        names = Counter(base_name(part.name) for part in wanted)
        assert names == Counter({part.name: 3 for part in held})
        assert {part.name.rpartition(base_name(part.name))[0] for part in wanted} == {"", "exp_avg/", "exp_avg_sq/"}
