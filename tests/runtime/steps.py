"""Driving a session by hand, in the order of the flow: the one place where tests do so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from nereus.runtime.rollouts import Rollouts
from nereus.runtime.session import STEP_FAILURES, Session


def prepare_step(session: Session, step: int, rollouts: Rollouts | None = None) -> None:
    """Draw rollouts, or go on from given ones (and from their scores, if they have any), up to the first update."""
    if rollouts is None:
        session.generate(step)
    else:
        session.begin_step(rollouts)
    if session.rollouts.scores is None:
        session.score(step)
    session.infer_reference(step)
    session.infer_logprobs(step)
    session.infer_values(step)
    session.estimate_advantages(step)


def complete_step(session: Session, step: int) -> dict[str, Any]:
    """Train on prepared rollouts and return the step's metrics."""
    session.train_actor(step)
    session.train_critic(step)
    session.sync_weights(step)
    return session.finish_step(step)


def run_step(session: Session, step: int) -> dict[str, Any]:
    """Run a whole step and return its metrics."""
    prepare_step(session, step)
    return complete_step(session, step)


def drive(
    session: Session,
    each: Callable[[int, dict[str, Any]], None] = lambda *_: None,
    *,
    run: Callable[[Session, int], dict[str, Any]] = run_step,
    finish: Callable[[Session], object] | None = None,
) -> None:
    """Run all steps that are left as the flow does, the plan under control.

    Args:
        each: sees the metrics of every step.
        run: runs a step and returns its metrics.
        finish: ends the run, and is done again like a step.
    """
    while (step := session.next_step) < session.config.steps or finish is not None:
        try:
            if step < session.config.steps or not session.is_whole:
                session.decide(step)
                if session.transition_due(step):
                    session.begin_transition(step)
                    if session.run_transition()["outcome"] != "committed":
                        continue
            if step == session.config.steps and finish is not None:
                finish(session)
                return
            metrics = run(session, step)
            session.stage_state(step)
        except STEP_FAILURES as error:
            session.make_ready(step, error)
            continue
        each(step, metrics)
