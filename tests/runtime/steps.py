"""Driving a session by hand, in the order of the flow: the one place where tests do so."""

from __future__ import annotations

from typing import Any

from nereus.runtime.rollouts import Rollouts
from nereus.runtime.session import Session


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
