"""A run directory with a journal and staged sets of a tiny model, made without any worker."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from nereus.commits import Commit
from nereus.config import RunConfig, build_config
from nereus.layout import Layout
from nereus.model.spec import ModelSpec
from nereus.plan import Plan, StagePlan
from nereus.resume import compute_identity
from nereus.runtime.job import tiny_spec
from nereus.staged_state import STAGED, plan_shards, staged_shapes
from storage.journal import Journal
from storage.manifest import Manifest
from storage.shard_writer import ShardWriter
from storage.slices import whole
from storage.state import commit_state

TINY = {"hidden": 32, "layers": 3, "heads": 4, "kv_heads": 4, "intermediate": 48}
Groups = dict[str, dict[str, Tensor]]  # whole tensors by group and name


def tiny_config(run_dir: str, **keys) -> RunConfig:
    tree = {"model": {"tiny": TINY}, "steps": 5, "run_dir": run_dir, "cluster": {"devices": 4}, **keys}
    return build_config(tree)


def plan_of(layout: Layout, dp: int = 1) -> Plan:
    stage = StagePlan(dp, layout, tuple(range(dp * layout.size)), micro_batch=2)
    return Plan.of(dict.fromkeys(STAGED, stage))


@dataclass
class FakeRun:
    """A run that commits what it is told to; a second one on the same directory is a driver that took over."""

    run_dir: str
    config: RunConfig
    plan: Plan = field(default_factory=lambda: plan_of(Layout(2, 1), dp=2))
    max_shard_bytes: int = 100_000

    def __post_init__(self) -> None:
        self.specs: dict[str, ModelSpec] = {
            "actor.training": tiny_spec(self.config.model.tiny, "lm"),
            "critic.training": tiny_spec(self.config.model.tiny, "value"),
        }
        self.identity = compute_identity(self.config)
        self.journal = Journal(self.run_dir)
        self.journal.entries()
        body = {"run_id": "amber", "flow_run_id": None, "host": "here", "pid": 1, "identity": self.identity,
                "config": self.config.model_dump(mode="json")}  # fmt: skip
        self.number = self.journal.append("take_over", body).number

    @property
    def root(self) -> str:
        return f"{self.run_dir}/state"

    def draw(self, step: int) -> Groups:
        """Return a state that no other step has."""
        generator = torch.Generator().manual_seed(step)
        dtype = torch.float64 if self.config.precision == "float64" else torch.float32
        return {
            group: {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in shapes.items()}
            for group, shapes in ((group, staged_shapes(spec)) for group, spec in self.specs.items())
        }

    def write(self, step: int) -> tuple[str, str]:
        """Write a set without committing it; return its name and its manifest's checksum."""
        state, name = self.draw(step), f"step-{step:08d}-{self.number}"
        records = []
        shards = plan_shards(self.plan, self.specs, element_bytes=4, max_shard_bytes=self.max_shard_bytes)
        for order in (order for orders in shards.values() for order in orders):
            writer = ShardWriter(f"{self.root}/{name}", group=order.group, file=order.file)
            for piece in order.pieces:
                tensor = state[order.group][piece.name]
                shape = tuple(tensor.shape)
                writer.add(piece, shape, tensor[piece.within(whole(piece.name, shape))].contiguous())
            records.append(writer.finish_shard())
        run_state = {"policy_version": 2 * step, "identity": self.identity}
        manifest = Manifest("amber", step, run_state, self.plan.to_record(), tuple(records))
        return name, commit_state(f"{self.root}/{name}", manifest)

    def commit(self, step: int) -> Commit:
        name, checksum = self.write(step)
        return Commit.of(self.journal.append("commit", {"step": step, "set": name, "manifest": checksum}))


def flip(path: str, position: int) -> None:
    """Change one bit of a local file, as a bad disk does; counted from the end where `position` is negative."""
    with open(path, "r+b") as file:
        file.seek(position, 0 if position >= 0 else 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
