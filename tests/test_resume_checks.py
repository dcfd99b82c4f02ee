"""What a resumed run may change, and the sentences for what it may not."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from nereus.config import RunConfig, build_config, override_config
from nereus.resume import check_resumable, check_resume, compute_identity, fit_plan, read_recorded
from storage.journal import Journal
from tests.fake_run import TINY, FakeRun, tiny_config
from tests.model.decoder_cases import SPECS, hf_model

PLAN = {"actor.generation": {"dp": 4}, "actor.training": {"dp": 4}, "critic.training": {"dp": 4},
        "reference.inference": {"dp": 4}}  # fmt: skip


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    hf_model(SPECS["llama"]).save_pretrained(folder)
    return folder


def check(config: RunConfig, *overrides: str) -> None:
    changed = override_config(config, overrides)
    check_resume(config, compute_identity(config), changed, compute_identity(changed))


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["cluster.devices=1", "cluster.memory_per_device=1GiB"],
        ["plan.actor.training.tp=2"],
        ["plan=[[0, auto], [3, auto]]", "transport=staged"],
        ["adapt={enabled: true, policy: every_k}", "drift.devices=[[0, 4], [2, 1]]"],
        ["steps=9"],
        ["staging.every=2", "staging.keep=5", "staging.lease_s=9"],
        ["tracking=[tensorboard]", "ppo.micro_batch=1"],
        ["reward.timeout_s=60", "reward.workers=2"],
    ],
)
def test_how_a_run_is_executed_may_change(tmp_path: Path, overrides: list[str]):
    check(tiny_config(str(tmp_path)), *overrides)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("seed=7", "`seed` was 0 when this run was started and is 7 now; leave it as it was, or start a new run"),
        ("precision=float64", "`precision` was float32 when this run was started and is float64 now"),
        ("rollout.top_p=0.5", "`rollout.top_p` was 1.0 when this run was started and is 0.5 now"),
        ("ppo.clip=0.3", "`ppo.clip` was 0.2 when this run was started and is 0.3 now"),
        ("model.tiny.layers=2", "`model.tiny.layers` was 3 when this run was started and is 2 now"),
        ("critic.tiny={}", "`critic.tiny` was empty when this run was started and is {"),
        ("reward.function=nereus.recipes.rewards:score_arithmetic", "`reward.function` was nereus.recipes.rewards:sc"),
        ("steps=4", "`steps` is 5 for this run so far and 4 now; a run can only be made longer: give at least 5"),
        ("staging.root=/elsewhere", "`staging.root` was "),
        ("run_dir=/elsewhere", "`run_dir` is /elsewhere, but the run that goes on lies in "),
    ],
)
def test_what_it_computes_may_not(tmp_path: Path, override: str, message: str):
    with pytest.raises(ValueError) as caught:
        check(tiny_config(str(tmp_path)), override)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_the_staging_root_is_compared_by_where_it_leads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config("runs/a")
    check(config, f"staging.root={tmp_path}/runs/a/state")
    check(config, f"run_dir={tmp_path}/runs/a/")


def test_random_models_are_told_apart_by_whose_they_are(tmp_path: Path):
    """An empty critic starts from the actor's numbers, one of the same sizes from its own."""
    shared = compute_identity(tiny_config(str(tmp_path)))
    own = compute_identity(tiny_config(str(tmp_path), critic={"tiny": TINY}))
    assert shared["model"] == shared["critic"] == shared["reference"] == own["model"] != own["critic"]


def test_changed_prompts_are_found(tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "aeiou"}\n')
    config = tiny_config(str(tmp_path), data={"prompts": str(prompts)})
    before = compute_identity(config)
    moved = tmp_path / "moved.jsonl"
    moved.write_text(prompts.read_text())
    check(config, f"data.prompts={moved}")  # the same prompts elsewhere
    prompts.write_text('{"prompt": "aeioa"}\n')
    with pytest.raises(ValueError, match=r"`data.prompts`: the prompts in .*prompts.jsonl are not those that this run"):
        check_resume(config, before, config, compute_identity(config))


def test_another_model_is_found_and_a_moved_one_is_not_another(tmp_path: Path, model_folder: Path):
    folder, moved = tmp_path / "model", tmp_path / "moved"
    shutil.copytree(model_folder, folder)
    shutil.copytree(model_folder, moved)
    config = build_config({"model": {"path": str(folder)}, "run_dir": str(tmp_path / "run")})
    before = compute_identity(config)
    assert before["model"] == before["critic"] == before["reference"]
    check(config, f"model.path={moved}")
    data = bytearray((folder / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(ValueError) as caught:
        check_resume(config, before, config, compute_identity(config))
    assert str(caught.value).startswith(f"`model.path`: {folder} holds another model than the one that this run was")
    assert before["model"][:26] in str(caught.value)


def test_a_changed_tokenizer_is_found(tmp_path: Path):
    folder = tmp_path / "tokenizer"
    shutil.copytree(Path(__file__).parents[1] / "nereus/recipes/char-tokenizer", folder)
    config = tiny_config(str(tmp_path), model={"tiny": {**TINY, "tokenizer": str(folder)}})
    before = compute_identity(config)
    text = (folder / "tokenizer.json").read_text()
    (folder / "tokenizer.json").write_text(text.replace("e", "E", 1))
    with pytest.raises(ValueError, match=r"`model`: .*tokenizer holds another tokenizer than the one"):
        check_resume(config, before, config, compute_identity(config))


def test_a_relative_path_that_leads_nowhere_says_from_where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    config = tiny_config("run", data={"prompts": "prompts.jsonl"})
    with pytest.raises(ValueError, match=rf"prompts.jsonl does not exist in the working directory {tmp_path}; go to"):
        compute_identity(config)


def test_what_is_recorded_is_read_back(tmp_path: Path):
    run_dir = str(tmp_path / "run")
    FakeRun(run_dir, tiny_config(run_dir, seed=3))
    longer = FakeRun(run_dir, tiny_config(run_dir, seed=3, steps=8))
    longer.commit(0)
    shutil.move(run_dir, tmp_path / "moved")
    run = read_recorded(f"{tmp_path}/moved/")
    assert (run.config.steps, run.config.seed, run.run_id) == (8, 3, "amber")
    assert run.config.run_dir == f"{tmp_path}/moved"
    assert run.identity == longer.identity
    assert [entry.kind for entry in run.entries] == ["take_over", "take_over", "commit"]


def test_a_directory_that_is_no_run(tmp_path: Path):
    for place in (tmp_path, tmp_path / "nowhere"):
        with pytest.raises(ValueError, match=r"holds no run"):
            read_recorded(str(place))
    with pytest.raises(ValueError, match=r"^RUN_DIR nosuch://x can't be read"):
        read_recorded("nosuch://x")


def test_a_record_of_another_version(tmp_path: Path):
    run_dir = str(tmp_path)
    body = {"run_id": "amber", "config": {"warp": 9}, "identity": {}}
    Journal(run_dir).append("take_over", body)
    with pytest.raises(ValueError, match=r"was written by another version of Nereus \(Unknown key `warp`"):
        read_recorded(run_dir)


def test_a_recorded_plan_gives_way_to_fewer_devices_and_a_given_one_does_not(tmp_path: Path):
    recorded = tiny_config(str(tmp_path), plan=PLAN)
    FakeRun(str(tmp_path), recorded)
    run = read_recorded(str(tmp_path))
    fewer = override_config(run.config, ["cluster.devices=2"])
    fitted, note = fit_plan(run, fewer)
    assert fitted.plan == "auto"
    assert note is not None and note.startswith("The recorded plan doesn't fit (plan.actor.generation: asks for device")
    assert fit_plan(run, run.config) == (run.config, None)
    assert check_resumable(str(tmp_path), ["cluster.devices=2"]) == fewer
    with pytest.raises(ValueError, match=r"asks for device"):
        check_resumable(str(tmp_path), ["cluster.devices=2", "plan.actor.training.dp=3"])


def test_of_a_recorded_schedule_counts_what_is_still_to_come(tmp_path: Path):
    one = {name: {"dp": 1} for name in PLAN}
    run = FakeRun(str(tmp_path), tiny_config(str(tmp_path), plan=[[0, PLAN], [2, one]]))
    fewer = override_config(run.config, ["cluster.devices=2"])
    for step, note in ((0, "The recorded plan doesn't fit (plan from step 0 on, actor.generation: asks for"), (1, "")):
        run.commit(step)
        found = fit_plan(read_recorded(str(tmp_path)), fewer)[1]
        assert (found or "").startswith(note) and bool(found) == bool(note)
