"""What the cost model is measured on: settings (model, lengths, samples) and the plans that are executed in each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

Entries = Mapping[str, Mapping[str, Any]]

NAMES = ("actor.generation", "actor.training", "critic.training", "reference.inference")


@dataclass(frozen=True)
class CostSetting:
    """One workload and the plans that run it.

    Attributes:
        recipe: whose config it changes, by `overrides`.
        calibrates: its times are what the model learns from; no prediction is made for it.
        plans: by name, as a config takes them.
        steps: that are measured, after one to warm up.
    """

    name: str
    recipe: str
    overrides: tuple[str, ...]
    plans: Mapping[str, Entries] = field(hash=False)
    calibrates: bool = False
    steps: int = 4


def everywhere(**entry: Any) -> dict[str, dict[str, Any]]:
    """Return the plan that gives all model-stages the same entry."""
    return {name: dict(entry) for name in NAMES}


def with_entries(plan: Entries, **changes: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a plan with the entries of some model-stages replaced; underscores stand for dots."""
    replaced = {name.replace("_", "."): dict(entry) for name, entry in changes.items()}
    return {name: replaced.get(name, dict(entry)) for name, entry in plan.items()}


DP, TP, PP, ONE = everywhere(dp=2), everywhere(tp=2), everywhere(pp=2), everywhere()
# The actor's and the critic's updates at the same time, each on a device of its own.
APART = with_entries(DP, actor_training={"devices": [0]}, critic_training={"devices": [1]})
MIXED = with_entries(
    DP, actor_generation={"tp": 2}, actor_training={"pp": 2}, critic_training={"dp": 2}, reference_inference={}
)
SMALL = everywhere(dp=2, micro_batch=4)
AGAIN = with_entries(
    DP,
    actor_training={"dp": 2, "micro_batch": 8, "recompute": True},
    critic_training={"dp": 2, "micro_batch": 8, "recompute": True},
)
FINE_PP = everywhere(pp=2, micro_batch=4)
ONE_SMALL = everywhere(micro_batch=8)
SWAPPED = with_entries(
    DP, actor_generation={"pp": 2}, actor_training={"tp": 2}, critic_training={"tp": 2}, reference_inference={"dp": 2}
)


def _tiny(
    name: str, prompts: int, tokens: int, plans: Mapping[str, Entries], *more: str, calibrates: bool = False
) -> CostSetting:
    overrides = (
        f"rollout.prompts_per_step={prompts}",
        f"rollout.max_response_tokens={tokens}",
        "rollout.stop_at_eos=false",
        "adapt.enabled=false",
        *more,
    )
    return CostSetting(name, "tiny-cpu", overrides, plans, calibrates)


def tiny_settings() -> tuple[CostSetting, ...]:
    """Return the settings of the tiny model."""
    most = {"dp": DP, "tp": TP, "pp": PP, "one": ONE, "apart": APART, "mixed": MIXED}
    return (
        _tiny("32 x 48", 32, 48, {**most, "small": SMALL, "again": AGAIN, "one-small": ONE_SMALL}, calibrates=True),
        _tiny("16 x 128", 16, 128, {"dp": DP, "tp": TP, "pp": PP, "one": ONE, "apart": APART}, calibrates=True),
        _tiny("64 x 16", 64, 16, {"dp": DP, "fine-pp": FINE_PP, "one": ONE, "swapped": SWAPPED}, calibrates=True),
        _tiny("32 x 24", 32, 24, {**most, "small": SMALL, "swapped": SWAPPED}),
        _tiny("32 x 96", 32, 96, {**most, "again": AGAIN, "fine-pp": FINE_PP}),
        _tiny("16 x 64", 16, 64, {**most, "one-small": ONE_SMALL}),
        _tiny("64 x 48", 64, 48, {**most, "small": SMALL, "swapped": SWAPPED, "again": AGAIN}),
        _tiny("24 x 160", 24, 160, {"dp": DP, "pp": PP, "one": ONE, "apart": APART, "fine-pp": FINE_PP}),
        _tiny("48 x 32, 4 updates", 48, 32, most, "ppo.minibatches=4"),
        _tiny("32 x up to 64", 32, 64, {**most, "small": SMALL}, "rollout.stop_at_eos=true"),
    )


def _smollm2(
    name: str, prompts: int, tokens: int, plans: Mapping[str, Entries], *, calibrates: bool = False
) -> CostSetting:
    overrides = (
        f"rollout.prompts_per_step={prompts}",
        f"rollout.max_response_tokens={tokens}",
        "rollout.stop_at_eos=false",
        "adapt.enabled=false",
        "staging.every=1000",
    )
    return CostSetting(name, "smollm2-135m", overrides, plans, calibrates, steps=2)


def smollm2_settings() -> tuple[CostSetting, ...]:
    """Return the settings of SmolLM2."""
    mixed = with_entries(DP, actor_generation={"tp": 2})
    layouts = {"dp": DP, "tp": TP, "pp": PP}
    return (
        _smollm2("SmolLM2 4 x 16", 4, 16, {"dp": DP, "pp": PP, "tp": TP}, calibrates=True),
        _smollm2("SmolLM2 4 x 32", 4, 32, {**layouts, "tp in generation": mixed, "apart": APART}),
        _smollm2("SmolLM2 6 x 16", 6, 16, {**layouts, "tp in generation": mixed}),
    )
