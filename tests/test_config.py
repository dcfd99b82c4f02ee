"""Recipes, overrides, and what is said about wrong input."""

from pathlib import Path

import pytest
import yaml

from nereus.config import (
    ConfigError,
    RunConfig,
    build_config,
    dump_config,
    format_bytes,
    list_recipes,
    load_config,
    override_config,
    parse_bytes,
    resolve_path,
)
from nereus.recipes.prompts import build_arithmetic, build_words
from nereus.recipes.rewards import score_arithmetic, score_vowels


@pytest.mark.parametrize("recipe", list_recipes())
def test_every_recipe_survives_the_way_through_its_file(recipe: str, tmp_path: Path):
    config = load_config(recipe)
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "run.yaml")) == config


def test_no_key_at_all_is_a_valid_run():
    assert build_config({}) == RunConfig()


def test_a_field_that_a_form_hands_over_empty_is_not_given():
    config = build_config({"run_dir": "", "staging": {"root": ""}, "critic": {"path": ""}})
    assert config == RunConfig()


def test_overrides_are_yaml_at_dotted_keys():
    config = load_config("tiny-cpu", ["steps=7", "ppo.actor_lr=1e-5", "cluster.memory_per_device=512MiB"])
    assert (config.steps, config.ppo.actor_lr, config.cluster.memory_per_device) == (7, 1e-5, 512 * 2**20)
    assert config.rollout == load_config("tiny-cpu").rollout


def test_dot_of_a_model_stage_belongs_to_its_name():
    config = load_config("tiny-cpu", ["plan.actor.generation.tp=2", "plan.actor.training={dp: 2, devices: [1, 0]}"])
    assert config.plan["actor.generation"].tp == 2
    assert config.plan["actor.training"].devices == (1, 0)


def test_a_schedule_is_read_and_written(tmp_path: Path):
    config = load_config("tiny-cpu", ["plan=[[0, auto], [2, {actor.generation: {dp: 2}}]]", "transport=staged"])
    (first, plan), (second, entries) = config.plan
    assert (first, plan, second, entries["actor.generation"].dp, config.transport) == (0, "auto", 2, 2, "staged")
    (tmp_path / "run.yaml").write_text(dump_config(config))
    assert load_config(str(tmp_path / "run.yaml")) == config
    assert build_config(config.model_dump(mode="json")) == config  # as journals and forms hold it


@pytest.mark.parametrize(
    "devices", ["[[0, 2], [3, 0], [5, 1]]", "trace.csv", "{file: trace.csv, scale: 2, max: 8}", "null", "''"]
)
def test_a_trace_of_devices_is_read_and_written(devices: str):
    config = load_config("tiny-cpu", [f"drift.devices={devices}"])
    expected = yaml.safe_load(devices) or None
    found = config.drift.devices
    assert (found.model_dump(exclude_unset=True) if isinstance(expected, dict) else found) == (
        tuple(map(tuple, expected)) if isinstance(expected, list) else expected
    )
    assert build_config(yaml.safe_load(dump_config(config))) == config


def test_a_key_of_a_schedule_cannot_be_set_alone():
    config = load_config("tiny-cpu", ["plan=[[0, auto]]"])
    with pytest.raises(ConfigError) as refused:
        override_config(config, ["plan.actor.generation.tp=2"])
    assert str(refused.value).startswith(
        "`plan.actor.generation.tp` can't be set alone, since `plan` is a schedule; give"
    )
    assert override_config(config, ["plan=auto"]).plan == "auto"


def test_override_of_one_source_takes_the_place_of_the_other():
    config = load_config("tiny-cpu", ["model.path=models/some", "reward.model=models/judge"])
    assert (config.model.path, config.model.tiny) == ("models/some", None)
    assert (config.reward.model, config.reward.function) == ("models/judge", None)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("rollout.tempratur=2", "Unknown key `rollout.tempratur`; did you mean `rollout.temperature`?"),
        ("temperature=2", "Unknown key `temperature`; did you mean `rollout.temperature`?"),
        ("plan.actor.generatoin.tp=2", "Unknown key `plan.actor.generatoin`; did you mean `plan.actor.generation`?"),
        ("plan.actor.generation.tpp=2", "Unknown key `plan.actor.generation.tpp`; did you mean"),
        ("async.enabled=true", "Unknown key `async`; the keys of a run config are model"),
        ("ppo.gamma=.nan", "`ppo.gamma` is nan: it must be a finite number."),
        ("ppo.clip=.inf", "`ppo.clip` is inf: it must be a finite number."),
        ("ppo.betas=[0.9, 1.0]", "`ppo.betas.1` is 1.0: it must be less than 1."),
        ("ppo.betas=[-0.1, 0.9]", "`ppo.betas.0` is -0.1: it must be greater than or equal to 0."),
        ("cluster.memory_per_device=1e400GiB", "cluster.memory_per_device: '1e400GiB' is beyond any memory."),
        ("steps=0", "`steps` is 0: it must be greater than 0."),
        ("plan.actor.generation.tp=0", "`plan.actor.generation.tp` is 0: it must be greater than 0."),
        (
            "plan=best",
            "plan: 'best' is no plan; give `auto`, a mapping of model-stages, or a schedule like [[0, {...}]",
        ),
        ("plan=[]", "plan: the schedule is empty; give `auto`, or a plan from step 0 on"),
        ("plan=[[0, auto], [2]]", "plan: the entry [2] of the schedule is no pair [step, plan]; write it"),
        ("plan=[[0, auto], 2]", "plan: the entry 2 of the schedule is no pair [step, plan]"),
        ("plan=[[1, auto]]", "plan: the schedule begins at step 1; its first entry must hold from step 0 on."),
        ("plan=[[0, auto], [-3, auto]]", "plan: the schedule names step -3; a step is an integer from 0 on."),
        ("plan=[[0, auto], [1.5, auto]]", "plan: the schedule names step 1.5; a step is an integer from 0 on."),
        (
            "plan=[[0, auto], [4, auto], [4, auto]]",
            "plan: the schedule names step 4 after step 4; let its steps ascend.",
        ),
        ("plan=[[0, auto], [4, best]]", "plan: from step 4 on it is 'best'; give `auto` or a mapping of model-stages."),
        (
            "plan=[[0, auto], [4, {actor.training: {tp: 0}}]]",
            "`plan.actor.training.tp` from step 4 on is 0: it must be",
        ),
        ("plan=[[0, {actor.trainin: {}}]]", "Unknown key `plan.actor.trainin`; did you mean `plan.actor.training`?"),
        ("transport=fast", "`transport` is 'fast': it must be 'auto', 'direct' or 'staged'."),
        ("drift.devices=[]", "drift.devices: the list is empty; leave it out, or write it like [[0, 4], [6, 2]]."),
        ("drift.devices=[[1, 2]]", "drift.devices: the list begins at step 1; its first entry must hold from step 0"),
        ("drift.devices=[[0, 2], [3]]", "drift.devices: the entry [3] of the list is no pair [step, devices]; write"),
        ("drift.devices=[[0, 2], [0, 1]]", "drift.devices: the list names step 0 after step 0; let its steps ascend."),
        (
            "drift.devices=[[0, 2], [3, 1, lost]]",
            "drift.devices: the entry [3, 1, 'lost'] is for the simulator; a trace",
        ),
        ("drift.devices=[[0, -1]]", "drift.devices: the entry [0, -1] has the number of devices -1; it is a whole"),
        ("drift.devices=[[0, 0]]", "drift.devices: the list has 0 devices for ever; let there be some at some step."),
        ("drift.devices=[[0, 2], [3, 9]]", "drift.devices has 9 devices at step 3, but cluster.devices is 2; lower it"),
        ("drift.devices=7", "drift.devices: 7 is no trace; write a list like [[0, 4], [6, 2]], or the path of a file."),
        ("drift.devices={scale: 2}", "`drift.devices.file` is missing; give it a value."),
        ("drift.devices={file: x, min: 3, max: 2}", "drift.devices: min 3 is above max 2; swap them."),
        ("drift.devices={file: x, maxi: 2}", "Unknown key `drift.devices.maxi`; did you mean `drift.devices.max`?"),
        ("adapt.policy=best", "`adapt.policy` is 'best': it must be 'payback', 'any_gain', 'every_k' or 'fixed'."),
        ("adapt.gamma=2", "`adapt.gamma` is 2: it must be less than or equal to 1."),
        ("adapt.every=0", "`adapt.every` is 0: it must be greater than 0."),
        ("cluster.memory_per_device=2XB", "cluster.memory_per_device: '2XB' is no size; write it like 2GiB"),
        ("cluster.engine=ray", "`cluster.engine` is 'ray': it must be 'local'."),
        ("ppo.minibatches=99", "ppo.minibatches 99 is above the 32 samples of a step; lower it or raise"),
        ("model.tiny=null", "model: neither `path` nor `tiny` is set; give a Hugging Face directory or a tiny model."),
        ("reward.function=score", "reward: function 'score' must read `package.module:name`."),
        ("steps", "The override `steps` must read key=value"),
        ("steps=[1", "The value of `steps=[1` is no YAML"),
    ],
)
def test_wrong_values_are_refused_in_one_sentence(override: str, message: str):
    with pytest.raises(ConfigError) as refused:
        load_config("tiny-cpu", [override])
    assert str(refused.value).startswith(message)
    assert "\n" not in str(refused.value)


def test_wrong_files_are_refused(tmp_path: Path):
    broken = tmp_path / "broken.yaml"
    broken.write_text("steps: 3\nmodel: {path: x\n")
    with pytest.raises(ConfigError, match=r"broken.yaml is no YAML: .* in line 3"):
        load_config(str(broken))
    with pytest.raises(ConfigError, match="no recipe and no file `tiny-gpu`; did you mean the recipe `tiny-cpu`"):
        load_config("tiny-gpu")


def test_every_key_has_a_description():
    def walk(schema: dict, where: str):
        for name, field in schema.get("properties", {}).items():
            assert field.get("description"), f"{where}.{name} has no description"

    schema = RunConfig.model_json_schema()
    walk(schema, "")
    for name, part in schema["$defs"].items():
        walk(part, name)


@pytest.mark.parametrize(
    ("text", "num_bytes"), [("2GiB", 2 * 2**30), ("1.5 KiB", 1536), ("10MB", 10**7), ("4096", 4096)]
)
def test_sizes_are_read_and_written(text: str, num_bytes: int):
    assert parse_bytes(text) == num_bytes
    assert parse_bytes(format_bytes(num_bytes)) == num_bytes


def test_shipped_prompts_are_what_their_maker_writes():
    for name, rows in (("words", build_words()), ("arithmetic", build_arithmetic())):
        lines = Path(resolve_path(f"pkg://nereus.recipes/{name}.jsonl")).read_text().splitlines()
        assert [yaml.safe_load(line) for line in lines[:20]] == [row for row, _ in zip(rows, range(20), strict=False)]


def test_rewards_stay_between_nothing_and_one():
    assert score_vowels("", "", {}) == 0
    assert score_vowels("", "salt", {"vowels": 4}) == 0.25
    assert score_vowels("", "a" * 99, {"vowels": 48}) == 1
    assert score_arithmetic("", "12 - 5 = 7", {"answer": 7}) == 1
    assert score_arithmetic("", "-3", {"answer": -3}) == 1
    assert score_arithmetic("", "no idea", {"answer": 7}) == 0
    assert 0 < score_arithmetic("", "99", {"answer": 7}) < score_arithmetic("", "8", {"answer": 7}) < 1
