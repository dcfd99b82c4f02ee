"""Scenarios: the shipped ones, overrides, and one sentence for each kind of wrong input."""

from pathlib import Path

import pytest
import yaml

from nereus.simulator.load import list_scenarios, load_scenario, load_traces
from nereus.simulator.world import build_world

SMALL = {
    "model": {"preset": "smollm2-135m"},
    "cluster": {"preset": "a100-64gb-hdr", "devices": 4},
    "workload": {"prompts_per_step": 16, "response_tokens": 100},
    "steps": 3,
}


def write(folder: Path, **changes: object) -> str:
    path = folder / "scenario.yaml"
    path.write_text(yaml.safe_dump({**SMALL, **changes}))
    return str(path)


def test_all_scenarios_of_the_package_make_sense(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("NEREUS_TRACES", raising=False)
    assert len(list_scenarios()) == 10
    for name in list_scenarios():
        world = build_world(load_scenario(name))
        assert min(world.device_counts) > 0
        assert ("SYNTHETIC" in world.traces.source) == name.startswith("paper-trace")


def test_overrides_are_dotted_and_yaml(tmp_path: Path):
    path = write(tmp_path)
    scenario = load_scenario(path, ["gamma=0.25", "truth.efficiency.gemm=0.4", "devices=[[0, 2], [1, 4, lost]]"])
    assert (scenario.gamma, scenario.truth.efficiency) == (0.25, {"gemm": 0.4})
    assert [pool.num_devices for pool in load_traces(scenario, 4).pools] == [2, 4, 4]
    config = tmp_path / "config.json"
    assert load_scenario(path, [f"model.path={config}"]).model.preset is None


def test_the_folder_of_traces_is_named_by_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "t.csv").write_text("seconds,available\n0,1\n300,2\n600,3\n")
    monkeypatch.setenv("NEREUS_TRACES", str(tmp_path))
    traces = load_traces(load_scenario(write(tmp_path, devices={"file": "t.csv"})), 4)
    assert [pool.num_devices for pool in traces.pools] == [1, 2, 3]
    assert "t.csv" in traces.source


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["gama=0.5"], "Unknown key `gama`; did you mean `gamma`?"),
        (["workload.algo=ppo"], "Unknown key `workload.algo`; did you mean `workload.algorithm`"),
        (["truth.wind=1"], "Unknown key `truth.wind`; the keys of `truth` are efficiency"),
        (["gamma=1.5"], "`gamma` is 1.5"),
        (["gamma=-0.1"], "`gamma` is -0.1"),
        (["model.preset=llama-9"], "model: preset is 'llama-9'"),
        (["critic.preset=llama-9"], "critic: preset is 'llama-9'"),
        (["model.path=/nowhere"], "model: path is '/nowhere'"),
        (["cluster.preset=tpu"], "tpu"),
        (["policies=[lucky]"], "policies"),
        (["policies=[]"], "`policies` is []: it must have at least 1 item"),
        (["steps=0"], "`steps` is 0"),
        (["gamma=.nan"], "`gamma` is nan"),
        (["truth.efficiency.magic=1"], "magic"),
        (["truth.noise=-0.1"], "`truth.noise` is -0.1"),
        (["truth.slow=[[-1, 0, 2.0]]"], "`truth.slow.0.0` is -1"),
        (["truth.slow=[[0, moon, 2.0]]"], "'moon'"),
        (["truth.slow=[[0, 9, 2.0]]"], "truth.slow names device 9"),
        (["devices={file: no.csv}"], "devices.file is 'no.csv'"),
        (["devices=[[0, 0]]"], "0 devices for ever"),
        (["devices=[]"], "says nothing of step 0"),
        (["devices={file: no.csv, min: 3, max: 2}"], "min 3 is above max 2"),
        (["cluster.devices=0"], "`cluster.devices` is 0"),
        (["cluster.devices=1000000"], "`cluster.devices` is 1000000"),
        (["devices=[[0, 5]]"], "asks for 5 devices, but cluster.devices is 4"),
        (["workload.response_tokens=no.csv"], "no.csv can't be read"),
        (["workload.response_tokens=[[0, -5]]"], "must be above 0"),
        (["workload.response_tokens=-5"], "`workload.response_tokens` is -5"),
        (["workload.response_tokens=true"], "True is no length"),
        (["workload.response_tokens=nan"], "`workload.response_tokens` is nan"),
        (["workload.response_tokens=8e3"], "more than the 8192 positions of actor.generation"),
        (["workload.prompt_tokens=-1"], "`workload.prompt_tokens` is -1"),
        (["workload.minibatches=17"], "minibatches 17 is above the 16 samples"),
        (["cluster.memory_per_device=3GiB"], "are both set"),
        (["cluster.preset=null"], "is not set"),
        (["steps"], "must read key=value"),
    ],
)
def test_wrong_input_is_told_in_one_sentence(
    overrides: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("NEREUS_TRACES", raising=False)
    with pytest.raises(ValueError, match=r".+") as error:
        build_world(load_scenario(write(tmp_path), overrides))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_names_and_files_that_there_are_not(tmp_path: Path):
    with pytest.raises(ValueError, match="did you mean the scenario `paper-trace-"):
        load_scenario("paper-trace")
    broken = tmp_path / "broken.yaml"
    broken.write_text("a: [")
    with pytest.raises(ValueError, match="is no YAML"):
        load_scenario(str(broken))
