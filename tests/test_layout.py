"""Layouts cut every tensor into disjoint slices that cover it, and copies between layouts fill each slice once."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nereus.layout import (
    Layout,
    check_layout,
    holdings,
    owned_slices,
    partition,
    plan_copies,
    slices_of,
    stage_layers,
)
from nereus.model.spec import ModelSpec, num_parameters, tensors
from storage.slices import TensorSlice

SMOLLM2 = ModelSpec("llama", 49_152, 576, 30, 9, 3, 64, 1_536, tie_embeddings=True)
quick = settings(max_examples=60, deadline=None)


@st.composite
def specs(draw) -> ModelSpec:
    kv_heads = draw(st.integers(1, 5))
    return ModelSpec(
        family="llama",
        vocab=draw(st.integers(5, 11)),
        hidden=draw(st.integers(1, 4)),
        layers=draw(st.integers(1, 5)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([1, 2])),
        intermediate=draw(st.integers(5, 9)),
        tie_embeddings=draw(st.booleans()),
        qkv_bias=draw(st.booleans()),
        o_bias=draw(st.booleans()),
        qk_norm=draw(st.booleans()),
        head=draw(st.sampled_from(["lm", "value", "score"])),
    )


@st.composite
def layouts(draw, spec: ModelSpec) -> Layout:
    return Layout(draw(st.integers(1, spec.kv_heads)), draw(st.integers(1, spec.layers)))


@st.composite
def cut_models(draw) -> tuple[ModelSpec, Layout]:
    spec = draw(specs())
    return spec, draw(layouts(spec))


def _add(counts: dict[str, np.ndarray], part: TensorSlice) -> None:
    counts[part.name][tuple(slice(a, b) for a, b in zip(part.starts, part.stops, strict=True))] += 1


def _zeros(spec: ModelSpec) -> dict[str, np.ndarray]:
    return {name: np.zeros(info.shape, int) for name, info in tensors(spec).items()}


@quick
@given(cut_models())
def test_owned_slices_cover_every_element_once(model):
    spec, layout = model
    counts = _zeros(spec)
    for rank in range(layout.size):
        for part in owned_slices(spec, layout, rank):
            _add(counts, part)
    assert all((count == 1).all() for count in counts.values())


@quick
@given(cut_models())
def test_holders_are_the_ranks_whose_slices_name_them(model):
    spec, layout = model
    held = {(rank, part) for rank in range(layout.size) for part in slices_of(spec, layout, rank)}
    assert held == {(rank, h.slice) for h in holdings(spec, layout) for rank in h.holders}
    for holding in holdings(spec, layout):
        assert holding.owner in holding.holders
        assert list(holding.holders) == sorted(set(holding.holders))


@quick
@given(cut_models())
def test_a_rank_holds_whole_kv_groups(model):
    spec, layout = model
    for rank in range(layout.size):
        rows = {part.name: part.sizes[0] for part in slices_of(spec, layout, rank)}
        for name in (n for n in rows if n.endswith("k_proj.weight")):
            assert rows[name] % spec.head_dim == 0 and rows[name] > 0
            assert rows[name.replace("k_proj", "q_proj")] == rows[name] * spec.group_size


@quick
@given(cut_models())
def test_stages_take_consecutive_layers_and_the_first_ones_the_odd(model):
    spec, layout = model
    stages = [list(stage_layers(spec, layout, stage)) for stage in range(layout.pp)]
    assert list(itertools.chain(*stages)) == list(range(spec.layers))
    counts = [len(stage) for stage in stages]
    assert counts == sorted(counts, reverse=True) and counts[0] - counts[-1] <= 1


@given(st.integers(0, 40), st.integers(1, 9))
def test_partition_is_even_and_complete(units, parts):
    ranges = partition(units, parts)
    assert [i for a, b in ranges for i in range(a, b)] == list(range(units))
    sizes = [b - a for a, b in ranges]
    assert max(sizes) - min(sizes) <= 1


@st.composite
def moves(draw):
    """A model, two layouts, and replicas of each on devices that may overlap."""
    spec = draw(specs())
    source, target = draw(layouts(spec)), draw(layouts(spec))
    order = draw(st.permutations(range(60)))
    sources = [order[i * source.size : (i + 1) * source.size] for i in range(draw(st.integers(1, 2)))]
    shift = draw(st.integers(0, source.size))
    targets = [order[shift + i * target.size : shift + (i + 1) * target.size] for i in range(draw(st.integers(1, 2)))]
    return spec, source, sources, target, targets


@quick
@given(moves())
def test_copies_fill_every_target_slice_once_and_come_from_holders(move):
    spec, source, sources, target, targets = move
    held = {device: slices_of(spec, source, rank) for devices in sources for rank, device in enumerate(devices)}
    wanted = {device: slices_of(spec, target, rank) for devices in targets for rank, device in enumerate(devices)}
    counts = {device: _zeros(spec) for device in wanted}
    for copy in plan_copies(spec, source, sources, target, targets):
        assert any(part.intersect(copy.slice) == copy.slice for part in held[copy.source])
        resident = any(part.intersect(copy.slice) == copy.slice for part in held.get(copy.target, ()))
        assert (copy.source == copy.target) == resident
        _add(counts[copy.target], copy.slice)
    for device, parts in wanted.items():
        expected = _zeros(spec)
        for part in parts:
            _add(expected, part)
        for name, count in counts[device].items():
            np.testing.assert_array_equal(count, expected[name])


def test_senders_share_the_load_over_replicas():
    copies = plan_copies(SMOLLM2, Layout(), [[0], [1]], Layout(), [[2]])
    sent = [sum(c.slice.num_elements for c in copies if c.source == device) for device in (0, 1)]
    assert sum(sent) == num_parameters(SMOLLM2)
    assert max(sent) - min(sent) <= SMOLLM2.vocab * SMOLLM2.hidden  # no more than the largest piece


def test_smollm2_on_tp_2_cuts_its_three_kv_heads_into_two_and_one():
    rows = [
        next(p for p in slices_of(SMOLLM2, Layout(2, 1), rank) if p.name.endswith("0.self_attn.q_proj.weight"))
        for rank in (0, 1)
    ]
    assert [(p.starts[0], p.sizes[0]) for p in rows] == [(0, 384), (384, 192)]


def test_a_tied_embedding_is_held_by_first_and_last_stage_and_owned_by_the_first():
    holding = next(h for h in holdings(SMOLLM2, Layout(1, 3)) if h.slice.name == "model.embed_tokens.weight")
    assert holding.holders == (0, 2) and holding.owner == 0


@pytest.mark.parametrize(
    ("layout", "words"),
    [
        (Layout(4, 1), "tp=4 is more than the model's 3 KV heads; choose tp <= 3"),
        (Layout(1, 31), "pp=31 is more than the model's 30 layers; choose pp <= 30"),
        (Layout(0, 1), "tp=0 pp=1 is no layout"),
    ],
)
def test_layouts_that_the_model_refuses(layout, words):
    with pytest.raises(ValueError, match=words):
        check_layout(SMOLLM2, layout)
