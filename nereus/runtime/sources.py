"""Where a model-stage's weights come from, as a value that travels to workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereus.model.spec import ModelSpec
from nereus.model.weights import CheckpointSource, FreshHead, RandomSource, WeightSource


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face directory (`path`), or random weights drawn from (seed, `weights_role`, tensor name).

    `fresh_head_role` names the role whose value or reward head is drawn anew instead of read.
    """

    spec: ModelSpec
    path: str | None
    seed: int
    weights_role: str
    fresh_head_role: str | None = None

    def open(self) -> WeightSource:
        spec = replace(self.spec, head="lm") if self.fresh_head_role else self.spec
        base: WeightSource
        if self.path is not None:
            base = CheckpointSource(self.path, spec)
        else:
            base = RandomSource(spec, self.seed, self.weights_role)
        return FreshHead(base, self.spec, self.seed, self.fresh_head_role) if self.fresh_head_role else base
