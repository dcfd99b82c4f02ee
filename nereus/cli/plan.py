"""`nereus plan`: the best plan for a run or for a real cluster, what it costs, and why others are worse."""

import json
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from nereus.catalog import MOST_DEVICES
from nereus.cli.exits import wrong_input_exits
from nereus.cli.root import OverridesArgument, app

if TYPE_CHECKING:
    from nereus.config import OptionalModelConfig, RunConfig
    from nereus.model.spec import Head, ModelSpec
    from nereus.planner import Setting

# How much longer than the mean the 95th percentile of response lengths is, where nobody says.
_P95_OVER_MEAN = 1.15


@app.command()
def plan(
    context: typer.Context,
    recipe: Annotated[
        str | None, typer.Argument(metavar="[RECIPE_OR_YAML]", help="A recipe such as tiny-cpu, or a YAML file.")
    ] = None,
    overrides: OverridesArgument = None,
    model: Annotated[
        str | None, typer.Option(metavar="PRESET", help="A model such as llama-3.1-8b, or a Hugging Face config.json.")
    ] = None,
    cluster: Annotated[str | None, typer.Option(metavar="PRESET", help="A cluster such as h200-hdr.")] = None,
    devices: Annotated[
        int | None, typer.Option(metavar="N", min=1, max=MOST_DEVICES, help="Devices; default all there are.")
    ] = None,
    response_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Mean length of a response.")] = 1024,
    prompt_tokens: Annotated[int, typer.Option(metavar="N", min=1, help="Mean length of a prompt.")] = 512,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Responses a step.")] = 1024,
    minibatches: Annotated[int, typer.Option(metavar="N", min=1, help="Optimizer updates a step.")] = 4,
    reward_model: Annotated[
        bool, typer.Option(help="Score by a model as large as the actor, or by a function.")
    ] = True,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Find the best plan for a run, or with --model and --cluster for a cluster that needn't be there."""
    from nereus.planner import plan_search
    from nereus.planner.report import search_record, search_tables

    with wrong_input_exits():
        if recipe is not None:
            _refuse_both(context)
            setting, title = _setting_of_run(recipe, overrides or [], devices)
        else:
            _refuse_neither(model, cluster)
            setting, title = _setting_of_cluster(
                str(model), str(cluster), devices, response_tokens, prompt_tokens, samples, minibatches, reward_model
            )
        found = plan_search(setting)
    if as_json:
        typer.echo(json.dumps(search_record(found)))
        return
    console = Console()
    console.print(title, highlight=False)
    for table in search_tables(found):
        console.print()
        console.print(table, highlight=False)


# What a run config says itself.
_OPTIONS_OF_CLUSTERS = (
    *("model", "cluster", "response_tokens", "prompt_tokens"),
    *("samples", "minibatches", "reward_model"),
)


def _refuse_both(context: typer.Context) -> None:
    for name in _OPTIONS_OF_CLUSTERS:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            option, value = f"--{name.replace('_', '-')}", context.params[name]
            raise ValueError(f"{option} is {value!r} beside a run config; give a run config, or --model and --cluster.")


def _refuse_neither(model: str | None, cluster: str | None) -> None:
    for option, value in (("--model", model), ("--cluster", cluster)):
        if value is None:
            raise ValueError(f"{option} is missing; give a run config, or --model and --cluster.")


def _setting_of_run(recipe: str, overrides: list[str], devices: int | None) -> tuple["Setting", str]:
    """Return the setting of a run config: this machine, with responses as long as they may get."""
    from nereus.cluster import local_cluster
    from nereus.config import load_config
    from nereus.cost.efficiency import first_guess
    from nereus.cost.load import StepLoad
    from nereus.cost.step import JobSpec
    from nereus.planner import Setting

    more = [] if devices is None else [f"cluster.devices={devices}"]
    config = load_config(recipe, [*overrides, *more])
    rollout = config.rollout
    load = StepLoad(
        samples=rollout.samples_per_step,
        minibatches=config.ppo.minibatches,
        prompt_tokens=rollout.max_prompt_tokens,
        response_tokens=rollout.max_response_tokens,
        response_tokens_p95=rollout.max_response_tokens,
        epochs=config.ppo.epochs,
    )
    part = config.cluster
    cluster = local_cluster(part.devices, part.memory_per_device, threads_per_device=part.threads_per_device)
    job = JobSpec(
        _specs_of_run(config),
        load,
        config.precision,
        staging=config.staging.every == 1,
        most_micro_batch=config.ppo.most_micro_batch,
    )
    where = f"{part.devices} {part.device} device{'s' if part.devices > 1 else ''}"
    title = (
        f"{recipe} on {where}, {load.samples} responses of "
        f"{rollout.max_response_tokens} tokens (the longest allowed) a step, {config.precision}, speeds guessed"
    )
    job.check_positions()
    return Setting.of(job, cluster, first_guess(accelerator=cluster.kind.accelerator)), title


def _specs_of_run(config: "RunConfig") -> dict[str, "ModelSpec"]:
    """Return the models of a run by model-stage; what names no model of its own has the actor's."""
    from nereus.config import OptionalModelConfig

    specs = {
        "actor.generation": _spec(config.model, "lm"),
        "actor.training": _spec(config.model, "lm"),
        "critic.training": _spec(_own_or_actors(config.critic, config), "value"),
        "reference.inference": _spec(_own_or_actors(config.reference, config), "lm"),
    }
    if config.reward.model is not None:
        specs["reward.inference"] = _spec(OptionalModelConfig(path=config.reward.model), "score")
    return specs


def _own_or_actors(model: "OptionalModelConfig", config: "RunConfig") -> "OptionalModelConfig":
    return config.model if model.path is None and model.tiny is None else model


def _spec(model: "OptionalModelConfig", head: "Head") -> "ModelSpec":
    import os

    from nereus.config import resolve_path
    from nereus.model.checkpoint import read_spec
    from nereus.runtime.job import tiny_spec

    if model.tiny is not None:
        return tiny_spec(model.tiny, head)
    assert model.path is not None
    return read_spec(os.path.expanduser(resolve_path(model.path)), head=head)


def _setting_of_cluster(
    model: str,
    preset: str,
    devices: int | None,
    response_tokens: int,
    prompt_tokens: int,
    samples: int,
    minibatches: int,
    reward_model: bool,
) -> tuple["Setting", str]:
    """Return the setting of PPO with models of equal size on a cluster of the catalog."""
    from nereus.catalog import cluster_preset
    from nereus.cost.efficiency import PUBLISHED
    from nereus.cost.load import StepLoad
    from nereus.cost.step import JobSpec
    from nereus.planner import Setting
    from nereus.presets import list_models, model_preset, read_model

    cluster = cluster_preset(preset, devices)
    known = model in list_models() or ("/" not in model and not model.endswith(".json"))
    try:
        lm, value, score = (
            model_preset(model, head) if known else read_model(model, head) for head in ("lm", "value", "score")
        )
    except ValueError as error:
        raise ValueError(f"--model: {error}") from None
    specs = {"actor.generation": lm, "actor.training": lm, "critic.training": value, "reference.inference": lm}
    if reward_model:
        specs["reward.inference"] = score
    load = StepLoad(samples, minibatches, prompt_tokens, response_tokens, _P95_OVER_MEAN * response_tokens)
    num = len(cluster.devices)
    title = (
        f"{model} on {num} device{'s' if num > 1 else ''} of {preset}, {samples} responses of {response_tokens} tokens "
        f"in the mean a step (95% below {load.response_tokens_p95:.0f}), bfloat16, speeds of public kernels"
    )
    job = JobSpec(specs, load)
    job.check_positions()
    return Setting.of(job, cluster, PUBLISHED), title
