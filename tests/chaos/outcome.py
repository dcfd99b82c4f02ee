"""What a run came to, and whether two runs came to the same."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from nereus.commits import live_commits, read_commit
from nereus.staged_state import STAGED
from storage.journal import Journal
from storage.safetensors_header import DTYPES
from storage.slices import TensorSlice
from storage.state_reader import StateReader
from storage.urls import join_url

# What says how a step was executed, not what it came to.
EXECUTION = ("seconds", "peak_memory_bytes", "predicted_s", "devices_present", "warnings", "plan")


@dataclass(frozen=True)
class Outcome:
    """Lines of metrics, and parameters and moments by `group:name`."""

    metrics: list[dict[str, Any]]
    state: dict[str, np.ndarray]


def read_committed(run_dir: str) -> dict[str, np.ndarray]:
    """Return the whole tensors of a run's newest commit by `group:name`."""
    commit, root = live_commits(Journal(run_dir).entries())[-1], join_url(run_dir, "state")
    manifest = read_commit(root, commit)
    whole = {}
    for group in STAGED:
        metas = manifest.tensors_of(group)
        tensors = {name: torch.empty(meta.shape, dtype=DTYPES[meta.dtype]) for name, meta in metas.items()}
        wanted = [(TensorSlice(name, (0,) * t.dim(), tuple(t.shape)), t) for name, t in tensors.items()]
        with StateReader(join_url(root, commit.set_name), group, wanted) as reader:
            for record in manifest.shards_of(group):
                reader.feed(record)
            reader.finish()
        whole |= {f"{group}:{name}": tensor.numpy() for name, tensor in tensors.items()}
    return whole


def assert_same(outcome: Outcome, base: Outcome, *, bitwise: bool) -> None:
    """Check that two runs came to the same: each step once, the same samples, the same numbers.

    Args:
        outcome: of the run that was disturbed.
        base: of the run that was not.
        bitwise: on one plan every number is the same; else real ones may differ by rounding.
    """
    assert [line["step"] for line in outcome.metrics] == list(range(len(base.metrics)))
    ignored = EXECUTION if not bitwise else EXECUTION[:-1]
    for line, expected in zip(outcome.metrics, base.metrics, strict=True):
        assert line.keys() - set(ignored) == expected.keys() - set(ignored)
        for key in line.keys() - set(ignored):
            _assert_equal(line[key], expected[key], f"{key} of step {line['step']}", bitwise=bitwise)
    assert outcome.state.keys() == base.state.keys()
    for name, array in outcome.state.items():
        if bitwise:
            assert array.tobytes() == base.state[name].tobytes(), name
        else:
            assert np.abs(array - base.state[name]).max() <= 1e-9, name


def _assert_equal(value: Any, expected: Any, where: str, *, bitwise: bool) -> None:
    if isinstance(value, dict):
        assert value.keys() == expected.keys(), where
        for key in value:
            _assert_equal(value[key], expected[key], f"{where}, {key}", bitwise=bitwise)
    elif isinstance(value, list):
        for one, other in zip(value, expected, strict=True):
            _assert_equal(one, other, where, bitwise=bitwise)
    elif isinstance(value, float) and not bitwise:
        assert np.isclose(value, expected, rtol=1e-7, atol=1e-9), (where, value, expected)
    else:
        assert value == expected, where
