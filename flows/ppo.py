"""PPO post-training as a Prefect flow: `train_ppo` is the run, `run_step` one step of the algorithm.

generate -> score | reference | log-probs | values -> advantages -> train actor | critic -> sync -> metrics -> state
            ------------ at the same time ---------                  at the same time            written beside the next
Before each step `decide` looks at devices, lengths, memory and speed; where another plan pays, or the one in force
can't go on, `transition` leads to it. A step that loses a device, or runs out of memory, is done again: `make_ready`;
so is the end of the run.
"""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE
from prefect.flow_runs import suspend_flow_run
from prefect.futures import PrefectFuture, as_completed
from prefect.runtime import deployment, flow_run
from prefect.task_runners import ThreadPoolTaskRunner

from nereus.config import RunConfig, load_config
from nereus.progress import Event, publish
from nereus.runtime.session import STEP_FAILURES, NoDevices, Session
from tasks.adapt import decide, make_ready
from tasks.artifacts import ProgressArtifact, StateArtifact, publish_plan, publish_plots
from tasks.ppo import (
    estimate_advantages,
    finish_step,
    generate,
    infer_logprobs,
    infer_reference,
    infer_values,
    score,
    stage_state,
    sync_weights,
    train_actor,
    train_critic,
)
from tasks.transition import transition


# The runner's generic type is invariant in Prefect's signature, hence the ignore.
@flow(name="train-ppo", task_runner=ThreadPoolTaskRunner(max_workers=8), persist_result=False)  # type: ignore[arg-type]
def train_ppo(config: RunConfig = load_config("tiny-cpu"), resume_from: str | None = None) -> dict[str, Any]:
    """Train the actor with PPO on the config's plan and return a summary with the place of its checkpoint.

    A retry of this flow run goes on from its last commit.

    Args:
        config: the run; every key has a default.
        resume_from: run directory of another flow run to go on with, from its last commit; empty: a new run.
    """
    run_id = choose_run_id(config, resume_from)
    # Success, failure, cancel and SIGTERM all leave through here, and the workers are freed.
    with (
        suspended_without_devices(run_id),
        Session.open(config, run_id=run_id, flow_run_id=flow_run.id, resume_from=resume_from) as session,
    ):
        announce(session)
        progress, staged = ProgressArtifact(session.steps), StateArtifact(session.run_dir)
        history = session.read_metrics()
        summary: dict[str, Any] | None = None
        while summary is None:
            step = session.next_step
            try:
                if (step < config.steps or not session.is_whole) and not take_plan(session, step):
                    continue
                if step == config.steps:
                    summary = session.finish()
                    continue
                history[step:] = [run_step(session.run_id, step)]
            except STEP_FAILURES as error:
                make_ready(session.run_id, step, error)
                continue
            except NoDevices:
                session.settle()
                raise
            progress.update(step, history[-1])
            staged.update(session.newest_state)
        staged.update(summary["staged_state"], is_last=True)
        publish_plots(history, session.read_decisions(), session.read_transitions())
        return summary


def take_plan(session: Session, step: int) -> bool:
    """Choose the plan for a step and move to it; False: that failed, and the run may be back at its last commit."""
    decide(session.run_id, step)
    if not session.transition_due(step):
        return True
    move = transition(session.run_id, step)
    publish_plan(session.plan.to_record())
    return bool(move["outcome"] == "committed")


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
    metrics = finish_step(run_id, step)
    stage_state(run_id, step)
    return metrics


def gather(*futures: PrefectFuture[Any]) -> None:
    """Wait until all have ended; of failures the one raises that says which device it was."""
    errors = []
    for future in as_completed(list(futures)):
        try:
            future.result()
        except Exception as error:
            errors.append(error)
    if errors:
        raise next((error for error in errors if getattr(error, "device", None) is not None), errors[0])


@contextmanager
def suspended_without_devices(run_id: str) -> Iterator[None]:
    """Suspend a deployed flow run that can't go on with the devices there are; another one fails and can be resumed."""
    try:
        yield
    except NoDevices:
        if deployment.id is not None:
            # A key of its own: a run that is resumed begins from the top, and would take its next end for this one.
            suspend_flow_run(key=f"{run_id}-{uuid.uuid4().hex[:8]}")
        raise


def choose_run_id(config: RunConfig, resume_from: str | None = None) -> str:
    """Return the last part of the run directory if one is given, else the flow run's id."""
    run_dir = resume_from or config.run_dir
    return run_dir.rstrip("/").rsplit("/", 1)[-1] if run_dir else str(flow_run.id)


def announce(session: Session) -> None:
    """Tell who watches that the run is open, on which plan, and at which step it begins or goes on."""
    steps, plan = session.steps, session.plan.to_record()
    data = {"run_dir": session.run_dir, "steps": len(steps), "first_step": steps.start, "plan": plan}
    publish(Event("opened", session.run_id, None, data))
    publish_plan(plan)
