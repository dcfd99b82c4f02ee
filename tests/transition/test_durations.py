"""What the parts of a price count: two ways at once, commands, and pieces of checksums."""

import random
from dataclasses import replace

import pytest

from nereus.cluster import Link
from nereus.layout import Layout
from nereus.transition.critical_path import price_graph
from nereus.transition.durations import durations, num_pieces, primitive_seconds, verify_seconds
from nereus.transition.graph import plan_transition
from tests.transition.cases import LEAST_ROOM, SPECS, memory_for, random_plan, stage
from tests.transition.test_critical_path import SLOW, TRAINING, moved


def test_two_ways_at_once_share_a_link():
    """tp2 -> pp2: both devices send and receive; dp1 -> dp2: one sends, the other receives."""
    half = replace(SLOW, near_both=Link(5e5, 1e-3))
    graph, memory = moved(stage(1, 2, 1), stage(1, 1, 2), "direct")
    reshard = graph.primitives[0]
    fast, slow = (durations(graph, memory, speeds)[reshard.id] for speeds in (SLOW, half))
    assert slow > 1.7 * fast
    graph, memory = moved(stage(1, 1, 1), stage(2, 1, 1), "direct")
    assert durations(graph, memory, half) == durations(graph, memory, SLOW)


def test_every_command_counts():
    graph, memory = moved(stage(1, 2, 1), stage(1, 1, 2), "direct")
    assert [p.after_commit for p in graph.primitives] == [False, True]
    price = price_graph(graph, memory, replace(SLOW, command_s=1.0))
    assert price == pytest.approx(price_graph(graph, memory, SLOW) + 1 + 1 + 5)


def test_every_piece_is_summed_up():
    graph, memory = moved(stage(1, 1, 1), stage(2, 1, 1), "direct")
    more = verify_seconds(graph, memory, replace(SLOW, verify_piece_s=1.0)) - verify_seconds(graph, memory, SLOW)
    assert more == pytest.approx(2 * num_pieces(TRAINING, SPECS[TRAINING], Layout()))
    assert num_pieces(TRAINING, SPECS[TRAINING], Layout(2, 1)) < num_pieces(TRAINING, SPECS[TRAINING], Layout())


def test_what_differs_in_names_only_takes_as_long():
    """Seconds that were worked out for another primitive are the same as its own."""
    for seed in range(30):
        rng = random.Random(seed)
        current, target = (random_plan(rng, 16) for _ in range(2))
        memory = memory_for(current, target, LEAST_ROOM + rng.choice([0, 10**6]))
        speeds = replace(SLOW, node_of=[lambda device: device // 3, lambda device: device // 8][seed % 2])
        graph = plan_transition(current, target, memory, transport=rng.choice(["auto", "staged"]))
        first = [p for p in graph.primitives if not p.after_commit]
        assert durations(graph, memory, speeds) == {p.id: primitive_seconds(p, memory, speeds) for p in first}
