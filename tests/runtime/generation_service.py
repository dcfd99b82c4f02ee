"""A worker's service that generates with its rank of the small model."""

from __future__ import annotations

import torch

from nereus.layout import Layout
from nereus.model.kv_cache import KvCache
from nereus.plan import StagePlan
from nereus.runtime.generation import Request, Response, Sampling, generate
from nereus.runtime.links import connect_links
from nereus.runtime.worker import WorkerContext
from tests.runtime.generation_cases import SPEC, make_shard, make_weights


class GenerationService:
    """One replica over devices 0..tp*pp-1, connected anew for each command."""

    def __init__(self, context: WorkerContext) -> None:
        self.context = context

    def run(
        self, layout: Layout, requests: list[Request], sampling: Sampling, num_slots: int, epoch: int
    ) -> list[Response]:
        """Generate as a worker does in a step, and return what this rank has."""
        plan = StagePlan(1, layout, tuple(range(layout.size)), micro_batch=1)
        _, links = connect_links(self.context, "actor.generation", plan, epoch)
        shard = make_shard(SPEC, make_weights(SPEC), layout, links.rank, links.tp)
        options = {"num_slots": num_slots, "max_tokens": 24, "dtype": torch.float64, "device": "cpu"}
        cache = KvCache(SPEC, layout, links.rank, **options)
        try:
            return generate(shard, requests, sampling, cache=cache, replica=links.replica, tp=links.tp)
        finally:
            links.close()
