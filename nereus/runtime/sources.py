"""Where a model-stage's weights come from, as a value that travels to workers."""

from __future__ import annotations

from dataclasses import dataclass, replace

from nereus.model.spec import ModelSpec
from nereus.model.weights import FreshHead, RandomSource, WeightSource, open_weights


@dataclass(frozen=True)
class ModelSource:
    """A Hugging Face directory (`path`), or random weights drawn from (seed, `weights_role`, tensor name).

    `role` names what the model is used as; a value head that the files lack is drawn from (seed, role).
    """

    spec: ModelSpec
    path: str | None
    seed: int
    role: str
    weights_role: str

    def open(self) -> WeightSource:
        if self.path is not None:
            return open_weights(self.path, self.spec, seed=self.seed, role=self.role)
        if self.spec.head == "lm":
            return RandomSource(self.spec, self.seed, self.weights_role)
        backbone = RandomSource(replace(self.spec, head="lm"), self.seed, self.weights_role)
        return FreshHead(backbone, self.spec, self.seed, self.role)
