"""Conversion in place: the chunks add up, and their order keeps the peak low."""

from dataclasses import replace

import pytest

from nereus.layout import Layout, slices_of
from nereus.model.spec import tensors
from nereus.presets import model_preset
from nereus.transition.chunks import chunk_elements, chunk_order
from nereus.transition.memory import TransitionMemory
from tests.transition.cases import SPEC, SPECS, WORKLOAD

LAYOUTS = [Layout(1, 1), Layout(3, 1), Layout(2, 2), Layout(4, 3), Layout(1, 6)]


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_chunks_are_what_ranks_hold(layout: Layout, tied: bool):
    spec = replace(SPEC, tie_embeddings=tied)
    chunks = chunk_elements(spec, layout)
    for rank in range(layout.size):
        held = dict.fromkeys(chunks, 0)
        for part in slices_of(spec, layout, rank):
            held[tensors(spec)[part.name].place] += part.num_elements
        assert held == {chunk: counts[rank] for chunk, counts in chunks.items()}


@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("target", LAYOUTS)
def test_every_chunk_comes_once(source: Layout, target: Layout):
    order = chunk_order(SPEC, source, target)
    assert sorted(map(str, order)) == sorted({str(info.place) for info in tensors(SPEC).values()})


def test_stages_take_turns():
    order = chunk_order(SPEC, Layout(2, 1), Layout(1, 3))
    assert [chunk for chunk in order if isinstance(chunk, int)] == [0, 2, 4, 1, 3, 5]


def test_the_peak_of_a_large_model_is_a_few_layers():
    """tp 8 to pp 8 and back: above what a rank holds anyway it takes a layer and the ends, not half the model."""
    spec = model_preset("llama-3.1-8b")
    memory = TransitionMemory({"actor.training": spec}, WORKLOAD, "bfloat16", {})
    wide, deep = Layout(8, 1), Layout(1, 8)
    layer = 14 * 218_112_000
    ends = 14 * spec.vocab * spec.hidden
    for before, after in ((wide, deep), (deep, wide)):
        for rank in range(8):
            old, new = (memory.held("actor.training", layout)[rank] for layout in (before, after))
            peak = memory.in_place_peak("actor.training", (before, after), rank, rank)
            assert max(0, new - old) <= peak <= max(0, new - old) + 1.2 * layer + ends * 2 / 8
            assert memory.in_place_peak("actor.training", (before, after), None, rank) == new
            assert memory.in_place_peak("actor.training", (before, after), rank, None) == 0


def test_what_stays_stays():
    memory = TransitionMemory(SPECS, WORKLOAD, "float32", {})
    whole = Layout(1, 1)
    biggest = 12 * max(chunk_elements(SPEC, whole)[chunk][0] for chunk in chunk_order(SPEC, whole, whole))
    assert memory.in_place_peak("actor.training", (whole, whole), 0, 0) == biggest
