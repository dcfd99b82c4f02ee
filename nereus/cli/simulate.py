"""`nereus simulate`: policies over a trace of devices and lengths, in virtual time."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, get_args

import typer
from rich.console import Console

from nereus.cli.exits import wrong_input_exits
from nereus.cli.root import OverridesArgument, app

if TYPE_CHECKING:
    from nereus.simulator.compare import Comparison


@app.command()
def simulate(
    scenario: Annotated[
        str, typer.Argument(metavar="SCENARIO", help="A scenario such as paper-trace-1, or a YAML file.")
    ],
    overrides: OverridesArgument = None,
    policy: Annotated[
        list[str] | None, typer.Option(metavar="P", help="Run only these policies; may be given several times.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw the policies; .png, .svg or .pdf.")] = None,
) -> None:
    """Compare policies over a trace of devices and response lengths, in virtual time."""
    from nereus.simulator.compare import simulate as simulate_scenario
    from nereus.simulator.load import load_scenario

    status = Console(stderr=True).status("")
    with wrong_input_exits():
        _check_plot(plot)
        _check_policies(policy or [])
        loaded = load_scenario(scenario, overrides or [])
        with status:
            comparison = simulate_scenario(loaded, policy, each=lambda name: status.update(f"{scenario}: {name}"))
    if plot is not None:
        _write_plot(comparison, scenario, plot)
    if as_json:
        typer.echo(json.dumps(comparison.to_record()))
    else:
        _print_table(comparison, scenario)


def _check_policies(policies: list[str]) -> None:
    from nereus.simulator.scenario import Policy

    for name in policies:
        if name not in get_args(Policy):
            raise ValueError(f"--policy is {name!r}, which there is not; choose from {', '.join(get_args(Policy))}.")


def _check_plot(plot: Path | None) -> None:
    if plot is None:
        return
    if plot.suffix not in (".png", ".svg", ".pdf"):
        raise ValueError(f"--plot is {str(plot)!r}; its name must end in .png, .svg or .pdf.")
    if not plot.parent.is_dir():
        raise ValueError(f"--plot is {str(plot)!r}, but {plot.parent} is no folder; make it first.")


def _print_table(comparison: "Comparison", name: str) -> None:
    from nereus.simulator.table import build_table

    console = Console()
    console.print(build_table(comparison, Path(name).stem))
    for run in comparison.runs:
        if run.ended_by is not None:
            console.print(f"{run.policy} ended after {run.steps} steps: {run.ended_by}", highlight=False)
    warned = {text: (run.policy, step) for run in reversed(comparison.runs) for step, text in reversed(run.warnings)}
    for text, (policy, step) in warned.items():
        console.print(f"warning at step {step} ({policy}): {text}", style="yellow", highlight=False)


def _write_plot(comparison: "Comparison", name: str, path: Path) -> None:
    from nereus.report.simulation import draw_simulation, render

    world = comparison.world
    figure = draw_simulation(
        Path(name).stem,
        {run.policy: run.step_seconds() for run in comparison.runs},
        world.device_counts,
        [world.load(step).response_tokens for step in range(world.scenario.steps)],
        {run.policy: run.changes() for run in comparison.runs},
    )
    path.write_bytes(render(figure, path.suffix[1:]))
