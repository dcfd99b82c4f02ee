"""PPO post-training as a Prefect flow: `train_ppo` is the run, `run_step` one step of the algorithm.

generate -> score | reference | log-probs | values -> advantages -> train actor | critic -> weight sync -> metrics
            ------------ at the same time ---------                  at the same time
"""

from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from nereus.config import RunConfig, load_config
from nereus.progress import Event, publish
from nereus.runtime.session import Session
from tasks.artifacts import ProgressArtifact, publish_plan, publish_plots
from tasks.ppo import (
    estimate_advantages,
    finish_step,
    generate,
    infer_logprobs,
    infer_reference,
    infer_values,
    score,
    sync_weights,
    train_actor,
    train_critic,
)


# The runner's generic type is invariant in Prefect's signature, hence the ignore.
@flow(name="train-ppo", task_runner=ThreadPoolTaskRunner(max_workers=8), persist_result=False)  # type: ignore[arg-type]
def train_ppo(config: RunConfig = load_config("tiny-cpu"), resume_from: str | None = None) -> dict[str, Any]:
    """Train the actor with PPO on the config's plan and return a summary with the place of its checkpoint.

    Args:
        config: the run; every key has a default.
        resume_from: run directory to go on from; not supported yet, leave it empty.
    """
    if resume_from is not None:
        raise ValueError(f"resume_from {resume_from!r} is not supported yet; leave it empty and start a new run.")
    run_id = choose_run_id(config)
    # Success, failure, cancel and SIGTERM all leave through here, and the workers are freed.
    with Session.open(config, run_id=run_id) as session:
        num_steps, plan = len(session.steps), session.plan.to_record()
        publish(Event("opened", run_id, None, {"run_dir": session.run_dir, "steps": num_steps, "plan": plan}))
        publish_plan(plan)
        progress = ProgressArtifact(num_steps)
        history = []
        for step in session.steps:
            metrics = run_step(run_id, step)
            progress.update(step, metrics)
            history.append(metrics)
        summary = session.finish()
        publish_plots(history)
        return summary


@task(task_run_name="step-{step}", cache_policy=NO_CACHE, persist_result=False)
def run_step(run_id: str, step: int) -> dict[str, Any]:
    """Run one step of PPO and return its metrics. A task with tasks inside: a synchronous subflow costs a second."""
    generate(run_id, step)
    gather(
        score.submit(run_id, step),
        infer_reference.submit(run_id, step),
        infer_logprobs.submit(run_id, step),
        infer_values.submit(run_id, step),
    )
    estimate_advantages(run_id, step)
    gather(train_actor.submit(run_id, step), train_critic.submit(run_id, step))
    sync_weights(run_id, step)
    return finish_step(run_id, step)


def gather(*futures: PrefectFuture[Any]) -> None:
    """Wait until all have ended, or one has failed: that one raises at once."""
    for future in as_completed(list(futures)):
        future.result()


def choose_run_id(config: RunConfig) -> str:
    """Return the last part of the run directory if one is given, else the flow run's id."""
    return config.run_dir.rstrip("/").rsplit("/", 1)[-1] if config.run_dir else str(flow_run.id)
