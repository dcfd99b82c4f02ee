"""A run that was cut off goes on as if nothing had happened: on any layout, from the newest whole commit."""

from __future__ import annotations

import json
import logging
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import nereus.runtime.staged_steps
from nereus.commits import live_commits
from nereus.config import build_config
from nereus.runtime.engine import CommandError, Engine
from nereus.runtime.frame import FillablePlanning
from nereus.runtime.local import LocalEngine
from nereus.runtime.model_stages import restore_newest
from nereus.runtime.rank_state import Counters
from nereus.runtime.session import Session
from storage.journal import FencedOff, Journal
from storage.records import append_record, read_records
from tests.parity.runs import ODD_TINY, Run, largest_difference, read_whole, uniform_plan
from tests.parity.test_layouts import assert_bitwise_equal
from tests.runtime.steps import complete_step, prepare_step, run_step

STAGES = ["actor.generation", "actor.training", "critic.training", "reference.inference"]
TREE: dict[str, Any] = {
    "adapt": {"enabled": False},
    "model": {"tiny": ODD_TINY},
    "rollout": {"prompts_per_step": 6, "max_prompt_tokens": 16, "max_response_tokens": 10},
    "ppo": {"actor_lr": 3e-3, "critic_lr": 3e-3, "eps": 1e-5, "weight_decay": 0.1, "kl_adaptive": True,
            "kl_target": 0.1, "kl_horizon": 60, "lr_schedule": "cosine", "lr_warmup_updates": 3,
            "lr_decay_updates": 20},
    "precision": "float64",
    "steps": 4,
    "seed": 5,
    "cluster": {"devices": 4, "memory_per_device": "2GiB"},
    "staging": {"keep": 3},
}  # fmt: skip
TIED = {**ODD_TINY, "family": "qwen3", "tie_embeddings": True}


@pytest.fixture(scope="module")
def engine() -> Iterator[LocalEngine]:
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=2 << 30) as engine:
        engine.start(range(4))
        yield engine


def open_session(run_dir: Path | str, engine: Engine, *, go_on: bool = False, **tree: Any) -> Session:
    config = build_config({**TREE, **tree, "run_dir": str(run_dir)})
    return Session.open(config, run_id="run", engine=engine, resume_from=str(run_dir) if go_on else None)


def take_steps(session: Session, engine: Engine, steps: range | None = None) -> Run:
    """Take some steps, all that are left by default, and return what they leave."""
    result = Run()
    for step in session.steps if steps is None else steps:
        result.metrics.append(run_step(session, step))
        session.stage_state(step)
    for name in ("actor.training", "critic.training", "actor.generation"):
        result.parameters[name] = read_whole(session, engine, name)
    return result


def cut_off(run_dir: Path, engine: Engine, after: int, **tree: Any) -> None:
    """Take steps up to and including `after`, wait for its commit, then one more that is never committed."""
    with open_session(run_dir, engine, **tree) as session:
        take_steps(session, engine, range(after + 1))
        assert session._staging is not None and session._staging.wait(60)
        run_step(session, after + 1)


def commit_path(run_dir: Path, step: int) -> Path:
    commits = live_commits(Journal(str(run_dir)).entries())
    return run_dir / "state" / next(commit.set_name for commit in commits if commit.step == step)


@pytest.fixture(scope="module")
def undisturbed(engine: LocalEngine, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Runs of the two models that the others are held against."""
    runs = {}
    for name, tiny in (("llama", ODD_TINY), ("tied", TIED)):
        folder = tmp_path_factory.mktemp("undisturbed")
        tree = {"model": {"tiny": tiny}, "plan": uniform_plan(STAGES, 1, 1, 1)}
        with open_session(folder / "run", engine, **tree) as session:
            runs[name] = take_steps(session, engine)
    return runs


def assert_same(run: Run, base: Run) -> None:
    count = len(run.metrics)
    assert [m["rollouts_digest"] for m in run.metrics] == [m["rollouts_digest"] for m in base.metrics[-count:]]
    assert [m["kl_coef"] for m in run.metrics] == pytest.approx([m["kl_coef"] for m in base.metrics[-count:]], abs=1e-9)
    assert largest_difference(run, base) <= 1e-9


PAIRS = [
    ("llama", (1, 1, 1), (1, 2, 2)),
    ("llama", (1, 4, 1), (1, 3, 1)),
    ("llama", (2, 1, 2), (1, 1, 3)),
    ("llama", (1, 2, 2), (3, 1, 1)),
    ("tied", (1, 2, 2), (2, 1, 2)),
]


@pytest.mark.parametrize(
    ("model", "before", "after"),
    [PAIRS[0], *(pytest.param(*each, marks=pytest.mark.long) for each in PAIRS[1:])],
    ids=lambda x: x if isinstance(x, str) else "x".join(map(str, x)),
)
def test_on_another_layout_it_ends_with_the_same_model(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run], model: str, before: Any, after: Any
) -> None:
    tree = {"model": {"tiny": TIED if model == "tied" else ODD_TINY}}
    cut_off(tmp_path / "run", engine, 1, **tree, plan=uniform_plan(STAGES, *before))
    with open_session(tmp_path / "run", engine, go_on=True, **tree, plan=uniform_plan(STAGES, *after)) as session:
        assert session.steps == range(2, 4)
        run = take_steps(session, engine)
        assert [m["step"] for m in session.read_metrics()] == [0, 1, 2, 3]
    assert_same(run, undisturbed[model])


@pytest.mark.parametrize("precision", ["float32", pytest.param("bfloat16", marks=pytest.mark.long)])
def test_on_the_same_plan_it_ends_with_the_same_bits(tmp_path: Path, engine: LocalEngine, precision: str) -> None:
    tree = {"precision": precision, "plan": uniform_plan(STAGES, 2, 2, 1), "steps": 3}
    with open_session(tmp_path / "base", engine, **tree) as session:
        base = take_steps(session, engine)
    cut_off(tmp_path / "run", engine, 0, **tree)
    with open_session(tmp_path / "run", engine, go_on=True, **tree) as session:
        assert session.steps == range(1, 3)
        run = take_steps(session, engine)
    run.metrics = [base.metrics[0], *run.metrics]
    assert_bitwise_equal(run, base)


def test_before_the_first_commit_it_begins_anew(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run]
) -> None:
    with open_session(tmp_path / "run", engine) as session:
        run_step(session, 0)
    with open_session(tmp_path / "run", engine, go_on=True) as session:
        assert session.steps == range(4) and session.read_metrics() == []
        assert_same(take_steps(session, engine), undisturbed["llama"])


def test_again_and_again(tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run]) -> None:
    """Every driver takes one step; the next goes on, on other devices, after one more that isn't committed."""
    layouts = [(1, 2, 1), (1, 1, 3), (2, 2, 1)]
    cut_off(tmp_path / "run", engine, 0, plan=uniform_plan(STAGES, 1, 1, 1))
    for step, layout in enumerate(layouts, 1):
        plan = uniform_plan(STAGES, *layout)
        with open_session(tmp_path / "run", engine, go_on=True, plan=plan) as session:
            assert session.steps.start == step
            run = take_steps(session, engine, range(step, step + 1))
            assert session._staging is not None and session._staging.wait(60)
            if step < 3:
                run_step(session, step + 1)
    assert_same(run, undisturbed["llama"])
    kinds = [entry.kind for entry in Journal(str(tmp_path / "run")).entries()]
    assert kinds == ["take_over", "commit"] * 4


def damage_manifest(run_dir: Path) -> None:
    path = commit_path(run_dir, 1) / "manifest.json"
    path.write_bytes(path.read_bytes().replace(b'"step":1', b'"step":2', 1))


def damage_one_byte_of_a_tensor(run_dir: Path) -> None:
    path = sorted(commit_path(run_dir, 1).glob("critic.training-*"))[-1]
    data = bytearray(path.read_bytes())
    data[-5] ^= 1
    path.write_bytes(data)


def remove_a_shard(run_dir: Path) -> None:
    sorted(commit_path(run_dir, 1).glob("actor.training-*"))[0].unlink()


def cut_a_shard(run_dir: Path) -> None:
    path = sorted(commit_path(run_dir, 1).glob("actor.training-*"))[0]
    os.truncate(path, path.stat().st_size - 100)


def remove_the_set(run_dir: Path) -> None:
    shutil.rmtree(commit_path(run_dir, 1))


DAMAGES = [damage_manifest, damage_one_byte_of_a_tensor, remove_a_shard, cut_a_shard, remove_the_set]


@pytest.mark.parametrize(
    "damage",
    [DAMAGES[0], *(pytest.param(each, marks=pytest.mark.long) for each in DAMAGES[1:])],
    ids=lambda damage: damage.__name__,
)
def test_a_damaged_commit_is_named_and_the_one_before_is_used(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run], caplog: pytest.LogCaptureFixture, damage: Any
) -> None:
    run_dir = tmp_path / "run"
    cut_off(run_dir, engine, 1, plan=uniform_plan(STAGES, 1, 2, 1))
    damage(run_dir)
    with (
        caplog.at_level(logging.WARNING),
        open_session(run_dir, engine, go_on=True, plan=uniform_plan(STAGES, 1, 1, 2)) as session,
    ):
        assert session.steps == range(1, 4)
        assert_same(take_steps(session, engine), undisturbed["llama"])
        assert [m["step"] for m in session.read_metrics()] == [0, 1, 2, 3]
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 1 and "step-00000001-1" in said[0]
    assert said[0].endswith("The run goes on from step 0, the newest commit that is whole.")
    assert [commit.step for commit in live_commits(Journal(str(run_dir)).entries())] == [0, 1, 2, 3]


def test_a_run_without_a_whole_commit_is_refused(tmp_path: Path, engine: LocalEngine) -> None:
    run_dir = tmp_path / "run"
    cut_off(run_dir, engine, 1)
    for step in (0, 1):
        shutil.rmtree(commit_path(run_dir, step))
    with pytest.raises(ValueError, match=r"no commit in .*state is whole \(.*step-00000001-1.*\); start a new run"):
        open_session(run_dir, engine, go_on=True)
    assert [r["step"] for r in read_records(str(run_dir / "metrics.jsonl"))] == [0, 1, 2], "nothing was touched"
    assert engine.broken is None


def test_the_set_of_another_run_is_not_taken(tmp_path: Path, engine: LocalEngine) -> None:
    cut_off(tmp_path / "run", engine, 0)
    with Session.open(
        build_config({**TREE, "run_dir": str(tmp_path / "other")}), run_id="other", engine=engine
    ) as session:
        take_steps(session, engine, range(1))
    shutil.rmtree(commit_path(tmp_path / "run", 0))
    shutil.copytree(commit_path(tmp_path / "other", 0), commit_path(tmp_path / "run", 0))
    with pytest.raises(ValueError, match=r"no commit in .* is whole"):
        open_session(tmp_path / "run", engine, go_on=True)


def test_a_finished_run_goes_on_with_more_steps_or_is_only_exported(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run]
) -> None:
    run_dir = tmp_path / "run"
    with open_session(run_dir, engine, steps=2) as session:
        take_steps(session, engine)
        session.finish()
    final = run_dir / "final" / "model.safetensors"
    before = final.read_bytes()
    final.unlink()
    with open_session(run_dir, engine, go_on=True, steps=2) as session:
        assert session.steps == range(2, 2)
        summary = session.finish()
    assert final.read_bytes() == before and summary["staged_state"]["step"] == 1
    with open_session(run_dir, engine, go_on=True) as session:
        assert session.steps == range(2, 4)
        assert_same(take_steps(session, engine), undisturbed["llama"])
        session.finish()
    assert final.read_bytes() != before


def test_records_of_other_rooms_are_cut_back_too(tmp_path: Path, engine: LocalEngine) -> None:
    run_dir = tmp_path / "run"
    cut_off(run_dir, engine, 0)
    for name in ("decisions.jsonl", "transitions.jsonl"):
        for step in range(3):
            append_record(str(run_dir / name), {"step": step})
    with open_session(run_dir, engine, go_on=True):
        pass
    for name in ("metrics.jsonl", "decisions.jsonl", "transitions.jsonl"):
        assert [r["step"] for r in read_records(str(run_dir / name))] == [0], name


def test_a_driver_that_was_taken_over_while_it_restored_cuts_nothing_back(
    tmp_path: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir = tmp_path / "run"
    cut_off(run_dir, engine, 1)
    metrics = run_dir / "metrics.jsonl"
    append_record(str(metrics), {"step": 2})
    before = metrics.read_bytes()

    def restore_slowly(*arguments: Any) -> Any:
        Journal(str(run_dir)).append("take_over", {})  # by a driver of another host, after the lease
        return restore_newest(*arguments)

    monkeypatch.setattr(nereus.runtime.staged_steps, "restore_newest", restore_slowly)
    with pytest.raises(FencedOff):
        open_session(run_dir, engine, go_on=True)
    assert metrics.read_bytes() == before


def test_skipped_updates_are_counted_across_a_resume(tmp_path: Path, fragile: LocalEngine) -> None:
    """Two at the end of one step and one at the beginning of the next are three in a row."""
    tree = {"plan": {name: {"devices": [0]} for name in STAGES}}

    def spoil(session: Session, step: int) -> None:
        prepare_step(session, step)
        for advantages in session.rollouts.columns["advantages"]:
            advantages[-1] = math.inf

    with open_session(tmp_path / "run", fragile, **tree) as session:
        spoil(session, 0)
        assert complete_step(session, 0)["skipped_updates"] == 2
        session.stage_state(0)
    with open_session(tmp_path / "run", fragile, go_on=True, **tree) as session:
        assert session.counters["actor.training"] == Counters(updates=0, skipped_in_a_row=2)
        assert session.counters["critic.training"] == Counters(updates=2, skipped_in_a_row=0)
        spoil(session, 1)
        with pytest.raises(CommandError, match="not finite in 3 updates in a row"):
            session.train_actor(1)


# Who may go on


def test_the_same_flow_run_goes_on_by_itself_and_others_are_refused(tmp_path: Path, engine: LocalEngine) -> None:
    config = build_config({**TREE, "run_dir": str(tmp_path / "run")})
    with Session.open(config, run_id="run", engine=engine, flow_run_id="flow-1") as session:
        take_steps(session, engine, range(1))
    before = files_of(tmp_path)
    for flow_run_id in ("flow-2", None):
        with pytest.raises(ValueError, match=r"already holds a run; .* or go on with `nereus resume .*run`"):
            Session.open(config, run_id="run", engine=engine, flow_run_id=flow_run_id)
    assert files_of(tmp_path) == before
    with Session.open(config, run_id="run", engine=engine, flow_run_id="flow-1") as session:
        assert session.steps == range(1, 4)
    with Session.open(config, run_id="x", engine=engine, flow_run_id="2", resume_from=str(tmp_path / "run")) as session:
        assert session.run_id == "run" and session.steps == range(1, 4)
    with Session.open(config, run_id="run", engine=engine, flow_run_id="flow-1") as session:
        assert session.steps == range(1, 4), "a retry goes on with its run, whoever drove it since"


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def test_a_flow_run_without_a_directory_finds_its_own(
    tmp_path: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = build_config(TREE)
    with Session.open(config, run_id="f-1", engine=engine, flow_run_id="f-1", resume_from="") as session:
        take_steps(session, engine, range(1))
    with Session.open(config, run_id="f-1", engine=engine, flow_run_id="f-1") as session:
        assert session.steps == range(1, 4) and session.run_dir == os.path.join("runs", "f-1")
        take_steps(session, engine, range(1, 2))
    assert (tmp_path / "runs" / "f-1" / "state" / "step-00000001-3").is_dir()


def test_a_living_driver_is_not_disturbed(tmp_path: Path, engine: LocalEngine) -> None:
    with open_session(tmp_path / "run", engine) as session:
        take_steps(session, engine, range(1))
        config = build_config({**TREE, "run_dir": str(tmp_path / "run")})
        with pytest.raises(ValueError, match="is driven by another living process"):
            Session.open(config, run_id="second", engine=engine, resume_from=str(tmp_path / "run"))
        take_steps(session, engine, range(1, 2))


def test_wrong_input_leaves_the_run_as_it_is(tmp_path: Path, engine: LocalEngine) -> None:
    run_dir = tmp_path / "run"
    cut_off(run_dir, engine, 0)
    before = files_of(tmp_path)
    for tree, field in (
        ({"seed": 6}, "seed"),
        ({"steps": 2}, "steps"),
        ({"plan": {n: {"tp": 9} for n in STAGES}}, "plan"),
    ):
        with pytest.raises(ValueError, match=field):
            open_session(run_dir, engine, go_on=True, **tree)
    with pytest.raises(ValueError, match="holds no run"):
        Session.open(build_config(TREE), run_id="x", engine=engine, resume_from=str(tmp_path / "none"))
    assert files_of(tmp_path) == before and not (tmp_path / "none").exists()


def test_a_recorded_plan_that_does_not_fit_gives_way(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run], caplog: pytest.LogCaptureFixture
) -> None:
    tree = {"plan": uniform_plan(STAGES, 2, 2, 1)}
    cut_off(tmp_path / "run", engine, 1, **tree)
    cluster = {"devices": 2, "memory_per_device": "2GiB"}
    with open_session(tmp_path / "run", engine, go_on=True, **tree, cluster=cluster) as session:
        assert session.plan.devices == (0, 1)
        assert_same(take_steps(session, engine), undisturbed["llama"])
    assert "The recorded plan doesn't fit" in caplog.text


def test_under_control_a_run_goes_on_with_its_plan_or_with_one_that_is_given(
    tmp_path: Path, engine: LocalEngine, undisturbed: dict[str, Run]
) -> None:
    adapt, first, second = {"enabled": True}, uniform_plan(STAGES, 2, 1, 1), uniform_plan(STAGES, 1, 2, 1)
    cut_off(tmp_path / "run", engine, 1, adapt=adapt, plan=first)
    for plan in (first, second):
        with open_session(tmp_path / "run", engine, go_on=True, adapt=adapt, plan=plan) as session:
            assert {name: (stage.dp, stage.layout.tp) for name, stage in session.plan.items()} == {
                name: (plan[name]["dp"], plan[name]["tp"]) for name in STAGES
            }
            if plan is second:
                assert_same(take_steps(session, engine), undisturbed["llama"])


def test_under_control_a_plan_that_memory_takes_no_more_gives_way(
    tmp_path: Path, engine: LocalEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapt, plan = {"enabled": True}, uniform_plan(STAGES, 2, 2, 1)
    cut_off(tmp_path / "run", engine, 1, adapt=adapt, plan=plan)
    refit = FillablePlanning.refit
    monkeypatch.setattr(FillablePlanning, "refit", lambda self, boundary, rates, plan: (
        None if plan["actor.training"].layout.tp == 2 else refit(self, boundary, rates, plan)
    ))  # fmt: skip
    with open_session(tmp_path / "run", engine, go_on=True, adapt=adapt, plan="auto") as session:
        assert session.plan["actor.training"].layout.tp != 2


def test_staged_sets_of_two_runs_are_never_mixed(tmp_path: Path, engine: LocalEngine) -> None:
    staging = {"root": str(tmp_path / "shared")}
    with open_session(tmp_path / "run", engine, staging=staging) as session:
        take_steps(session, engine, range(1))
    config = build_config({**TREE, "run_dir": str(tmp_path / "other"), "staging": staging})
    with pytest.raises(
        ValueError, match=r"staging.root: .*shared holds the staged state of another run, .*run; choose"
    ):
        Session.open(config, run_id="other", engine=engine)
    assert not (tmp_path / "other").exists()
    (tmp_path / "run").rename(tmp_path / "moved")
    with Session.open(
        build_config({**TREE, "staging": staging}), run_id="x", engine=engine, resume_from=str(tmp_path / "moved")
    ) as session:
        assert session.steps.start == 1
    (tmp_path / "shared" / "run.json").write_text("torn")
    with pytest.raises(ValueError, match=r"^staging.root: .*shared holds .* another run, which its run.json does"):
        Session.open(config, run_id="other", engine=engine)


def test_a_place_that_cannot_be_written_is_refused_at_the_door(tmp_path: Path, engine: LocalEngine) -> None:
    (tmp_path / "file").write_text("")
    for tree, field in (({}, "run_dir"), ({"staging": {"root": str(tmp_path / "file" / "state")}}, "staging.root")):
        run_dir = tmp_path / ("run" if field == "staging.root" else "file/run")
        with pytest.raises(ValueError, match=rf"^{field}: .* can't be written \(.*\); choose another place\.$"):
            open_session(run_dir, engine, **tree)
    assert not (tmp_path / "run").exists()


# A start that fails


@pytest.fixture
def fragile() -> Iterator[LocalEngine]:
    with LocalEngine("nereus.runtime.rank:Rank", memory_per_device_bytes=2 << 30) as engine:
        engine.start([0])
        yield engine


def test_a_failed_start_leaves_no_new_run_and_spoils_no_old_one(
    tmp_path: Path, engine: LocalEngine, fragile: LocalEngine
) -> None:
    cut_off(tmp_path / "run", engine, 0)
    before = {path for path in files_of(tmp_path) if "/state/" in path}
    fragile.mark_broken("device 0 is out of order")
    tree = {"plan": {name: {"devices": [0]} for name in STAGES}}
    with pytest.raises(CommandError):
        open_session(tmp_path / "new", fragile, **tree, staging={"root": str(tmp_path / "root")})
    assert not (tmp_path / "new").exists() and not list((tmp_path / "root").iterdir())
    with pytest.raises(CommandError):
        open_session(tmp_path / "run", fragile, go_on=True, **tree)
    assert before <= set(files_of(tmp_path))
    with open_session(tmp_path / "run", engine, go_on=True) as session:
        assert session.steps == range(1, 4)


def test_the_journal_says_who_drove(tmp_path: Path, engine: LocalEngine) -> None:
    config = build_config({**TREE, "run_dir": str(tmp_path / "run")})
    with Session.open(config, run_id="run", engine=engine, flow_run_id="flow-1"):
        pass
    body = json.loads((tmp_path / "run" / "journal" / "00000001.json").read_text())["body"]
    assert (body["run_id"], body["flow_run_id"], body["pid"]) == ("run", "flow-1", os.getpid())
    assert body["config"]["seed"] == 5 and body["identity"]["model"].startswith("tiny:")
