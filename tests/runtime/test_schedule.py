"""Plans by step at the door: each fits, each move to the next too, and where one doesn't its step is named."""

from __future__ import annotations

from typing import Any

import pytest

from nereus.config import build_config
from nereus.runtime.job import Job, prepare_job
from nereus.transition.graph import plan_transition

STAGES = ("actor.generation", "actor.training", "critic.training", "reference.inference")


def whole(**entries: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return a plan with every model-stage on device 0, but those given by role, such as actor={"tp": 2}."""
    return {name: entries.get(name.split(".")[0], {}) for name in STAGES}


def prepare(plan: Any, *, first_step: int = 0, memory: str = "2GiB", **tree: Any) -> Job:
    cluster = {"devices": 4, "memory_per_device": memory}
    return prepare_job(build_config({"cluster": cluster, "plan": plan, **tree}), first_step=first_step)


def test_a_single_plan_holds_from_the_first_step_on() -> None:
    job = prepare("auto")
    assert job.schedule == ((0, job.plan),)
    assert job.plan_at(0) == job.plan_at(99) == job.plan


def test_an_entry_holds_from_its_step_on() -> None:
    job = prepare([[0, whole()], [2, whole(actor={"tp": 2})], [90, "auto"]])  # the run has 20 steps
    assert [step for step, _ in job.schedule] == [0, 2, 90]
    tps = [job.plan_at(step)["actor.training"].layout.tp for step in (0, 1, 2, 89)]
    assert tps == [1, 1, 2, 2]
    assert job.plan_at(90).devices == (0, 1, 2, 3)
    assert job.plan == job.plan_at(0)


def test_devices_come_in_the_order_in_which_the_moves_leave_them() -> None:
    job = prepare([[0, whole(critic={"dp": 2, "devices": [3, 1]})], [1, whole(critic={"tp": 2, "devices": [1, 3]})]])
    graph = plan_transition(job.plan_at(0), job.plan_at(1), job.transition_memory)
    assert graph.target == job.plan_at(1)
    assert set(job.plan_at(1)["critic.training"].devices) == {1, 3}


def test_a_run_that_goes_on_begins_with_the_plan_of_its_step() -> None:
    entries = [[0, whole(actor={"dp": 4})], [3, whole()], [6, whole(critic={"tp": 2})]]
    job = prepare(entries, first_step=4)
    assert job.plan == job.plan_at(4) == prepare(entries).plan_at(3)
    assert job.begin_at(6).plan == job.plan_at(6)


def test_what_held_only_before_it_goes_on_needs_no_devices_any_more() -> None:
    entries = [[0, whole(actor={"dp": 4, "devices": [4, 5, 6, 7]})], [3, whole()]]
    job = prepare(entries, first_step=3)
    assert job.schedule == ((0, job.plan),)
    with pytest.raises(ValueError, match=r"plan from step 0 on, actor.generation: asks for device 4, but there are 4"):
        prepare(entries, first_step=2)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (whole(actor={"dp": 2, "devices": [1, 1]}), ["step 4 on, actor.generation", "device 1 is listed twice"]),
        (whole(critic={"tp": 2, "devices": [1]}), ["step 4 on, critic.training", "needs 2 devices", "lists 1"]),
        (whole(reference={"devices": [7]}), ["step 4 on, reference.inference", "device 7", "4 devices"]),
        ({"actor.training": {}}, ["plan from step 4 on leaves out `actor.generation`"]),
        ({**whole(), "reward.inference": {}}, ["plan from step 4 on names `reward.inference`", "this run has not"]),
    ],
)
def test_a_wrong_entry_is_refused_with_its_step(wrong: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        prepare([[0, "auto"], [4, wrong]])
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message and message.endswith(".")


LARGE = {"tiny": {"hidden": 512, "layers": 8, "heads": 8, "kv_heads": 4, "intermediate": 1024, "vocab": 16}}
SWAP = [
    [0, whole(critic={"devices": [1]})],
    [4, whole(actor={"devices": [1]})],
]


def prepare_large(memory: str, transport: str) -> Job:
    rollout = {"prompts_per_step": 4, "max_prompt_tokens": 16, "max_response_tokens": 8}
    return prepare(SWAP, memory=memory, model=LARGE, rollout=rollout, transport=transport)


def test_two_model_stages_change_places_directly_where_there_is_room() -> None:
    prepare_large("900MiB", "direct")


def test_where_there_is_none_they_go_through_storage_and_direct_is_refused_with_the_numbers() -> None:
    prepare_large("540MiB", "auto")
    prepare_large("540MiB", "staged")
    with pytest.raises(ValueError) as caught:
        prepare_large("540MiB", "direct")
    message = str(caught.value)
    words = ("plan from step 4 on: transport: direct can't carry this transition", "device 0", "MiB", "transport: auto")
    assert all(word in message for word in words), message


def test_an_entry_that_needs_more_memory_than_there_is_is_refused_with_its_step() -> None:
    large = {"cluster": {"devices": 4, "memory_per_device": "540MiB"}, "model": LARGE}
    entries = [[0, whole(actor={"tp": 4}, critic={"tp": 4})], [4, whole()]]
    with pytest.raises(ValueError, match=r"^plan from step 4 on needs .* GiB on device 0 .* but 90% of its 0.53 GiB"):
        prepare_job(build_config({**large, "plan": entries}))
