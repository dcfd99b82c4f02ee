"""The drawing of a graph: every primitive, every edge; large graphs in one box for each model-stage and kind."""

import re

from nereus.plan import MODEL_STAGES, Plan
from nereus.transition.graph import plan_transition
from nereus.transition.mermaid import MOST_BOXES, to_mermaid
from tests.transition.cases import memory_for, stage

TRAINING = "actor.training"


def test_a_small_graph_shows_everything():
    current = Plan.of({TRAINING: stage(1, 1, 1), "critic.training": stage(1, 1, 1)})
    target = Plan.of({TRAINING: stage(2, 1, 1, [1, 2]), "critic.training": stage(1, 1, 1)})
    graph = plan_transition(current, target, memory_for(current, target, 10**7), transport="staged")
    text = to_mermaid(graph, {"actor.training/restore/0": 0.25})
    assert text.splitlines() == [
        "flowchart LR",
        '  subgraph "actor.training"',
        '    p0["stage<br/>devices 0<br/>444.66 KiB staged"]',
        '    p1["restore<br/>devices 1<br/>444.66 KiB staged<br/>0.25 s"]',
        '    p2["restore<br/>devices 2<br/>444.66 KiB staged"]',
        '    p3["destroy<br/>devices 0"]',
        "  end",
        "  commit([commit])",
        "  p0 ==> p1",
        "  p0 ==> p2",
        "  p1 --> commit",
        "  p2 --> commit",
        "  commit --> p3",
    ]


def test_edges_for_memory_are_dashed():
    current, target = Plan.of({TRAINING: stage(1, 1, 1)}), Plan.of({TRAINING: stage(1, 1, 1, [1])})
    current = Plan.of({**dict(current.items()), "critic.training": stage(1, 1, 1, [1])})
    target = Plan.of({**dict(target.items()), "critic.training": stage(1, 1, 1, [0])})
    graph = plan_transition(current, target, memory_for(current, target, 1_000))
    text = to_mermaid(graph)
    dashed = sum(len(p.resource_edges) for p in graph.primitives)
    assert dashed and text.count("-.->") == dashed
    state = sum(len(p.depends_on) - len(p.resource_edges) for p in graph.primitives)
    assert len(re.findall(r"p\d+ --> p\d+", text)) == state


def test_a_large_graph_is_grouped():
    current = Plan.of({name: stage(64, 1, 1) for name in MODEL_STAGES})
    target = Plan.of({name: stage(128, 1, 1) for name in MODEL_STAGES})
    graph = plan_transition(current, target, memory_for(current, target, 10**7))
    assert len(graph.primitives) > MOST_BOXES
    text = to_mermaid(graph)
    assert text.count("subgraph") == len(MODEL_STAGES)
    assert text.count("64 × extend<br/>devices 0-127") == len(MODEL_STAGES)
    assert len(text.splitlines()) < MOST_BOXES
