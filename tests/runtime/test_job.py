"""At the door: wrong input is one sentence that names the field and the mend, before any worker starts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from nereus.config import build_config
from nereus.runtime.job import prepare_job
from nereus.runtime.session import Session


def prepare(**tree: Any) -> Any:
    return prepare_job(build_config({"cluster": {"devices": 2, "memory_per_device": "2GiB"}, **tree}))


def entry(dp: int = 1, tp: int = 1, pp: int = 1, **rest: Any) -> dict[str, Any]:
    return {"dp": dp, "tp": tp, "pp": pp, **rest}


def plan_with(name: str, wanted: dict[str, Any]) -> dict[str, Any]:
    stages = ("actor.generation", "actor.training", "critic.training", "reference.inference")
    return {stage: wanted if stage == name else entry() for stage in stages}


def test_the_default_config_is_a_job() -> None:
    job = prepare()
    assert list(job.specs) == ["actor.generation", "actor.training", "critic.training", "reference.inference"]
    assert job.specs["critic.training"].head == "value"
    assert job.plan.devices == (0, 1)
    assert len(job.prompts) > 10


def test_the_actors_weights_are_the_default_of_critic_and_reference() -> None:
    sources = prepare().sources
    assert sources["critic.training"].weights_role == sources["reference.inference"].weights_role == "actor"
    other = prepare(reference={"tiny": {"layers": 2}}).sources["reference.inference"]
    assert (other.weights_role, other.spec.layers) == ("reference", 2)


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        ({"model": {"path": "no/such/model"}}, ["no/such/model"]),
        ({"model": {"path": "s3://who:secret@bucket/model"}}, ["model.path: s3://bucket/model", "credentials in it"]),
        ({"reward": {"function": "no.such.module:score"}}, ["no.such.module"]),
        ({"reward": {"function": "nereus.recipes.rewards:no_such"}}, ["no_such"]),
        ({"reward": {"model": "no/such/reward"}}, ["no/such/reward"]),
        ({"data": {"prompts": "no/such.jsonl"}}, ["data.prompts", "no/such.jsonl"]),
        ({"plan": plan_with("actor.training", entry(dp=3))}, ["plan.actor.training", "device 2", "2 devices"]),
        ({"plan": plan_with("actor.training", entry(devices=[7]))}, ["plan.actor.training", "device 7"]),
        ({"plan": plan_with("actor.training", entry(dp=2, devices=[1, 1]))}, ["plan.actor.training", "twice"]),
        ({"plan": plan_with("actor.training", entry(dp=2, devices=[1]))}, ["plan.actor.training", "needs 2 devices"]),
        (
            {"plan": plan_with("critic.training", entry(tp=4)), "cluster": {"devices": 4}},
            ["plan.critic.training", "tp=4", "2 KV heads"],
        ),
        (
            {"plan": plan_with("critic.training", entry(pp=5)), "cluster": {"devices": 5}},
            ["plan.critic.training", "pp=5", "4 layers"],
        ),
        (
            {"plan": plan_with("actor.training", entry(dp=2)), "rollout": {"prompts_per_step": 2}},
            ["plan.actor.training", "dp=2", "1 samples of a minibatch"],
        ),
        ({"plan": {"actor.training": entry()}}, ["leaves out", "actor.generation"]),
        ({"plan": {**plan_with("", {}), "reward.inference": entry()}}, ["reward.inference", "this run has not"]),
        (
            {"cluster": {"devices": 1, "memory_per_device": "8MiB"}},
            ["on device 0", "90% of its 8.00 MiB", "cluster.memory_per_device"],
        ),
        ({"model": {"tiny": {"vocab": 12}}}, ["vocabulary of 12"]),
        ({"rollout": {"max_response_tokens": 9000}}, ["rollout.max_response_tokens", "positions"]),
        ({"rollout": {"max_prompt_tokens": 1}}, ["rollout.max_prompt_tokens is 1"]),
        ({"run_dir": "memory://amber"}, ["run_dir: memory://amber", "several"]),
        ({"staging": {"root": "memory://amber"}}, ["staging.root: memory://amber", "object store"]),
        ({"reference": {"tiny": {"vocab": 20}}}, ["reference", "vocabulary of 20"]),
    ],
)
def test_wrong_input_names_the_field(tree: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ValueError) as caught:
        prepare(**tree)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message
    assert message.rstrip().endswith(".")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", ["is empty"]),
        ('{"prompt": "ab"}\n{"prompt": \n', ["line 2", "not JSON"]),
        ('{"question": "ab"}\n', ["line 1", "prompt"]),
    ],
)
def test_a_broken_prompts_file_names_the_line(tmp_path: Path, text: str, words: list[str]) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError) as caught:
        prepare(data={"prompts": str(file)})
    assert all(word in str(caught.value) for word in [*words, "prompts.jsonl"]), str(caught.value)


def test_no_worker_and_no_run_directory_before_the_door_is_passed(tmp_path: Path) -> None:
    config = build_config({"model": {"path": "no/such/model"}, "run_dir": str(tmp_path / "run")})
    with pytest.raises(ValueError):
        Session.open(config, run_id="run")
    assert not (tmp_path / "run").exists()


def test_a_directory_that_holds_a_run_is_refused(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "run.yaml").write_text("{}")
    with pytest.raises(ValueError, match="already holds a run"):
        Session.open(build_config({"run_dir": str(run_dir)}), run_id="run")
    assert json.dumps(sorted(p.name for p in run_dir.iterdir())) == '["run.yaml"]'
