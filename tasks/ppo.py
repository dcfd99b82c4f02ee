"""The tasks of one PPO step, in the order of the algorithm.

They take a run id and find the session that is open in this process: a handle never travels through Prefect.
"""

from collections.abc import Callable
from typing import Any, ParamSpec

from prefect import Task, task
from prefect.cache_policies import NO_CACHE

from nereus.progress import Event, publish
from nereus.runtime.session import find_session

Record = dict[str, Any]
P = ParamSpec("P")


def ppo_task(function: Callable[P, Record]) -> Task[P, Record]:
    """Return a function of (run_id, step) as a task that is neither cached nor stored: the run's own files are."""
    name = function.__name__
    return task(name=name, task_run_name=name + "-{step}", cache_policy=NO_CACHE, persist_result=False, retries=0)(
        function
    )


@ppo_task
def generate(run_id: str, step: int) -> Record:
    """Draw the step's rollouts with the newest policy version."""
    publish(Event("stage", run_id, step, {"stage": "generation"}))
    return find_session(run_id).generate(step)


@ppo_task
def score(run_id: str, step: int) -> Record:
    """Score the responses with the reward function or the reward model."""
    publish(Event("stage", run_id, step, {"stage": "inference"}))
    return find_session(run_id).score(step)


@ppo_task
def infer_reference(run_id: str, step: int) -> Record:
    """Compute the reference's log-probs."""
    return find_session(run_id).infer_reference(step)


@ppo_task
def infer_logprobs(run_id: str, step: int) -> Record:
    """Compute the trainer's own log-probs of the rollouts."""
    return find_session(run_id).infer_logprobs(step)


@ppo_task
def infer_values(run_id: str, step: int) -> Record:
    """Compute the critic's values."""
    return find_session(run_id).infer_values(step)


@ppo_task
def estimate_advantages(run_id: str, step: int) -> Record:
    """Turn scores, KL and values into advantages and returns."""
    return find_session(run_id).estimate_advantages(step)


@ppo_task
def train_actor(run_id: str, step: int) -> Record:
    """Run all epochs and minibatches of the actor."""
    publish(Event("stage", run_id, step, {"stage": "training"}))
    return find_session(run_id).train_actor(step)


@ppo_task
def train_critic(run_id: str, step: int) -> Record:
    """Run all epochs and minibatches of the critic."""
    return find_session(run_id).train_critic(step)


@ppo_task
def sync_weights(run_id: str, step: int) -> Record:
    """Bring the new weights to the replicas that generate."""
    publish(Event("stage", run_id, step, {"stage": "weight sync"}))
    return find_session(run_id).sync_weights(step)


@ppo_task
def finish_step(run_id: str, step: int) -> Record:
    """Write the step's line of metrics and return it."""
    metrics = find_session(run_id).finish_step(step)
    publish(Event("step", run_id, step, metrics))
    return metrics


@ppo_task
def stage_state(run_id: str, step: int) -> Record:
    """Begin to commit the state at the end of the step, from which the run could be resumed."""
    return find_session(run_id).stage_state(step)
