"""What commands take: counted inside the workers, brought together by task, and told to the controller."""

from __future__ import annotations

from pathlib import Path

import pytest

from nereus.config import build_config
from nereus.data import PromptTokens
from nereus.layout import Layout
from nereus.plan import Plan, StagePlan
from nereus.runtime.command_times import CommandTimes, Spending, StepTimes
from nereus.runtime.generation import Response
from nereus.runtime.local import LocalEngine
from nereus.runtime.measure import measure_step
from nereus.runtime.rollouts import Rollouts
from nereus.runtime.session import Session
from tests.runtime.steps import prepare_step

TASKS = {
    "actor.generation/generation",
    "actor.training/inference",
    "actor.training/training",
    "critic.training/inference",
    "critic.training/training",
    "reference.inference/inference",
    "weight_sync",
}


def test_spending_begins_anew_with_each_command():
    spending = Spending()
    for seconds in (0.25, 0.5):
        spending.add("all_reduce", seconds, 100)
    spending.add("p2p", 0.125, 7)
    times = spending.take(2.0)
    assert times == CommandTimes(2.0, {"all_reduce": 0.75, "p2p": 0.125}, {"all_reduce": 200, "p2p": 7})
    assert times.own_s == 1.125
    assert spending.take(1.0) == CommandTimes(1.0)


def test_a_task_is_as_slow_as_its_slowest_device_and_waits_as_its_busiest_one():
    times = StepTimes()
    times.note("actor.training", "infer_logprobs", {0: CommandTimes(2.0, {"all_reduce": 1.0}), 1: CommandTimes(1.5)})
    times.note(
        "actor.training", "train", {0: CommandTimes(4.0, {"dp_sync": 1.5}), 1: CommandTimes(4.25, {"dp_sync": 0.5})}
    )
    times.note("actor.generation", "sync_weights", {0: CommandTimes(0.5, {"weight_sync": 0.25})})
    times.note("memory", "read_memory", {0: CommandTimes(9.0)})
    assert times.tasks_s() == {"actor.training/inference": 2.0, "actor.training/training": 4.25, "weight_sync": 0.5}
    assert times.classes_s() == {"actor.training/training": {"dp_sync": 0.5}, "weight_sync": {"weight_sync": 0.25}}


def test_commands_of_a_task_that_ran_twice_add_up():
    times = StepTimes()
    for seconds in (1.0, 2.0):
        one = CommandTimes(seconds, {"all_reduce": 0.5}, {"all_reduce": 8})
        times.note("reward.inference", "infer_scores", {3: one})
    assert times.of_task("reward.inference/inference") == {
        3: CommandTimes(3.0, {"all_reduce": 1.0}, {"all_reduce": 16})
    }


def test_equal_work_is_a_tokens_on_the_same_rank_of_three_replicas():
    plan = Plan.of({"actor.training": StagePlan(3, Layout(1, 2), (0, 1, 2, 3, 4, 5), 1)})
    times = StepTimes()
    spent = {d: CommandTimes(1.0 + d, {"dp_sync": 0.5}) for d in range(6)}
    times.note("actor.training", "train", spent)
    assert measure(times, plan) == []  # nobody has said how many tokens they had
    times.note_tokens("actor.training/training", dict.fromkeys(range(6), 10))
    first, second = measure(times, plan)
    assert first == pytest.approx({0: 0.05, 2: 0.25, 4: 0.45}) and second == pytest.approx({1: 0.15, 3: 0.35, 5: 0.55})
    two = Plan.of({"actor.training": StagePlan(2, Layout(1, 2), (0, 1, 2, 3), 1)})
    assert measure(times, two) == []


def measure(times: StepTimes, plan: Plan) -> list[dict[int, float]]:
    responses = [Response(0, [1, 2], [0.0, 0.0]), Response(1, [1, 2, 3, 4], [0.0] * 4)]
    rollouts = Rollouts([0, 1], [PromptTokens([1], "a", {}, [])] * 2, responses)
    outcome = measure_step(
        step=7, seconds=9.0, times=times, rollouts=rollouts, plan=plan, max_response_tokens=4, peaks={0: 5}
    )
    assert (outcome.step, outcome.seconds, outcome.peak_bytes) == (7, 9.0, {0: 5})
    assert (outcome.response_tokens, outcome.response_tokens_longest, outcome.share_at_cap) == (3, 4, 0.5)
    return [dict(one) for one in outcome.equal_work_s]


def test_a_real_step_says_what_its_tasks_took(tmp_path: Path):
    config = build_config(
        {
            "model": {"tiny": {}},
            "reward": {"function": "nereus.recipes.rewards:score_vowels"},
            "rollout": {"prompts_per_step": 8, "max_prompt_tokens": 16, "max_response_tokens": 16},
            "cluster": {"devices": 2, "memory_per_device": "1GiB"},
            "run_dir": str(tmp_path / "run"),
            "adapt": {"enabled": False},
            "plan": {
                "actor.generation": {"tp": 2},
                "actor.training": {"pp": 2},
                "critic.training": {"dp": 2},
                "reference.inference": {},
            },
        }
    )
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=1 << 30) as engine:
        engine.start([0, 1])
        with Session.open(config, run_id="times", engine=engine) as session:
            prepare_step(session, 0)
            session.train_actor(0)
            session.train_critic(0)
            session.sync_weights(0)
            metrics = session.finish_step(0)
            outcome = session.outcome
    assert outcome is not None and set(outcome.stages_s) == TASKS
    assert all(seconds > 0 for seconds in outcome.stages_s.values())
    assert sum(outcome.stages_s.values()) <= outcome.seconds <= metrics["seconds"]["total"]
    classes = outcome.classes_s
    assert set(classes["actor.generation/generation"]) == {"all_reduce", "all_gather"}
    assert set(classes["critic.training/training"]) == {"dp_sync"} and set(classes["weight_sync"]) == {"weight_sync"}
    for task, spent in classes.items():  # a pipeline's waits are for work, not for messages
        assert "p2p" not in spent and sum(spent.values()) <= outcome.stages_s[task]
    assert {str(device): peak for device, peak in outcome.peak_bytes.items()} == metrics["peak_memory_bytes"]
