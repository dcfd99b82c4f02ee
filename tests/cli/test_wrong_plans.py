"""Plans that can't be: `nereus run` refuses each with one sentence that has the numbers, and nothing is begun."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from nereus.cli import app

REST = "actor.generation: {}, critic.training: {}, reference.inference: {}"
LARGE = (
    "model.tiny={hidden: 512, layers: 8, heads: 8, kv_heads: 4, intermediate: 1024, vocab: 16}",
    "rollout={prompts_per_step: 4, max_prompt_tokens: 16, max_response_tokens: 8}",
)
# Actor and critic change places between two devices.
SWAP = (
    "plan=["
    "[0, {actor.generation: {}, actor.training: {}, critic.training: {devices: [1]}, reference.inference: {}}], "
    "[4, {actor.generation: {devices: [1]}, actor.training: {devices: [1]}, critic.training: {}, "
    "reference.inference: {}}]]"
)
SHRINK = (
    "plan=["
    "[0, {actor.generation: {}, actor.training: {tp: 4}, critic.training: {tp: 4}, reference.inference: {}}], "
    f"[4, {{actor.training: {{}}, {REST}}}]]"
)


def plan(training: str) -> str:
    return f"plan={{actor.training: {{{training}}}, {REST}}}"


def later(training: str) -> str:
    return f"plan=[[0, {{actor.training: {{}}, {REST}}}], [4, {{actor.training: {{{training}}}, {REST}}}]]"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        ([plan("dp: 2, devices: [1, 1]")], ["plan.actor.training: device 1 is listed twice"]),
        ([later("dp: 2, devices: [1, 1]")], ["plan from step 4 on, actor.training: device 1 is listed twice"]),
        (
            [plan("dp: 2, tp: 2, devices: [0, 1, 2]")],
            ["plan.actor.training: dp*tp*pp = 2*2*1 needs 4 devices, but `devices` lists 3"],
        ),
        ([later("pp: 2, devices: [1]")], ["step 4 on, actor.training", "1*1*2 needs 2 devices, but `devices` lists 1"]),
        ([plan("dp: 2, devices: [1, 9]")], ["asks for device 9, but there are 4 devices (0..3)"]),
        ([later("dp: 5")], ["plan from step 4 on, actor.training: asks for device 4, but there are 4 devices (0..3)"]),
        (
            [plan(""), "cluster.memory_per_device=16MiB"],
            ["plan needs ", " MiB on device 0 ", "but 90% of its 16.00 MiB are 14.40 MiB"],
        ),
        (
            [*LARGE, SHRINK, "cluster.memory_per_device=540MiB"],
            ["plan from step 4 on needs 0.", " GiB on device 0 ", "but 90% of its 0.53 GiB are 0.47 GiB"],
        ),
        (
            [*LARGE, SWAP, "cluster.memory_per_device=300MiB", "transport=staged"],
            ["plan from step 0 on needs 4", " MiB on device 0 ", "but 90% of its 300.00 MiB are 270.00 MiB"],
        ),
        (
            [*LARGE, SWAP, "cluster.memory_per_device=540MiB", "transport=direct"],
            ["plan from step 4 on: transport: direct can't carry this transition: making ", " MiB on device 0, where ",
             " MiB of the ", "use transport: auto or staged"],
        ),
    ],
)  # fmt: skip
def test_a_plan_that_can_not_be_is_refused(overrides: list[str], words: list[str], tmp_path: Path) -> None:
    run_dir = tmp_path / "amber"
    arguments = ["run", "tiny-cpu", "cluster.devices=4", *overrides, "--run-dir", str(run_dir)]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert line.startswith("nereus: plan") and line.endswith(".")
    assert all(word in line for word in words), line
    assert not run_dir.exists()
