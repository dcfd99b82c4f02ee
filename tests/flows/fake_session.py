"""A session without workers: the flow and its tasks are tested against it."""

import threading
import time
from pathlib import Path
from typing import Any, ClassVar, Self

from nereus.config import RunConfig
from nereus.runtime.engine import CommandError
from nereus.runtime.session import NoDevices
from nereus.transition.primitives import TransitionGraph
from tests.flows.fake_transition import FakeTransition, plan_on


class FakeSession:
    """Records which method ran for which step, in order; `delay_s` and `fail_at` make it slow or broken.

    `graphs` = what changes the plan before a step; `fail_primitive` fails; `set_back_to` is where that leads.
    `decisions` are taken before steps; before `ends_at` there are no devices left. With `losses` above 0, what fails is
    the loss of a device, and after so many tries the run ends.
    """

    opened: ClassVar[dict[str, "FakeSession"]] = {}
    graphs: ClassVar[dict[int, TransitionGraph]] = {}
    delay_s: float = 0.0
    fail_at: tuple[str, int] | None = None
    fail_primitive: str | None = None
    set_back_to: int | None = None
    decisions: ClassVar[dict[int, dict[str, Any]]] = {}
    ends_at: int | None = None
    losses: ClassVar[int] = 0

    def __init__(self, config: RunConfig, run_id: str):
        self.run_id = run_id
        self.run_dir = config.run_dir or f"runs/{run_id}"
        self.steps = range(config.steps)
        self.next_step = 0
        self.plan = plan_on(2)
        self.transitions: list[FakeTransition] = []
        self.calls: list[tuple[str, int]] = []
        self.flow_run_id: str | None = None
        self.resume_from: str | None = None
        self.closed = False
        self.is_whole = True
        self._lock = threading.Lock()

    @classmethod
    def open(cls, config: RunConfig, *, run_id: str, flow_run_id: str | None, resume_from: str | None) -> "FakeSession":
        session = cls.opened[run_id] = cls(config, run_id)
        session.flow_run_id, session.resume_from = flow_run_id, resume_from
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.closed = True
        if Path(self.run_dir).is_dir():
            Path(self.run_dir, "closed").touch()

    def decide(self, step: int) -> dict[str, Any] | None:
        if self.ends_at == step:
            raise NoDevices(f"There are no devices from step {step} on.")
        self.is_whole = True
        return self.decisions.get(step)

    def make_ready(self, step: int, error: Exception) -> dict[str, Any]:
        self._note("make_ready", step)
        if self.fail_at is not None and self.losses > 1:
            FakeSession.losses -= 1
            self.is_whole = False
            return {"step": step}
        raise error

    def read_decisions(self) -> list[dict[str, Any]]:
        return list(self.decisions.values())

    def read_transitions(self) -> list[dict[str, Any]]:
        return []

    def settle(self) -> None:
        self._note("settle", self.next_step)

    def transition_due(self, step: int) -> bool:
        return step in self.graphs and step not in [transition.step for transition in self.transitions]

    def begin_transition(self, step: int) -> FakeTransition:
        self._note("begin_transition", step)
        self.transitions.append(FakeTransition(step, self.graphs[step], fail_at=self.fail_primitive))
        return self.transitions[-1]

    def find_transition(self) -> FakeTransition:
        return self.transitions[-1]

    def run_transition(self, submit: Any) -> dict[str, Any]:
        line = self.transitions[-1].run(submit)
        if line["outcome"] == "committed":
            self.plan = self.transitions[-1].graph.target
        elif self.set_back_to is not None:
            self.next_step = self.set_back_to
        return line

    def finish_step(self, step: int) -> dict[str, Any]:
        self._note("finish_step", step)
        self.next_step = step + 1
        seconds = {"generation": 0.5, "training": 0.4, "orchestration": 0.1, "total": 1.0}
        return {"step": step, "reward_mean": step / 10, "reward_std": 0.1, "kl_k1": 0.01, "kl_k3": 0.01,
                "response_tokens_mean": 10.0 + step, "response_tokens_p95": 20.0, "rollout_tokens": 320,
                "plan": self.plan.to_record(), "seconds": seconds}  # fmt: skip

    @property
    def newest_state(self) -> dict[str, Any] | None:
        staged = [step for name, step in self.calls if name == "stage_state"]
        return {"step": staged[-1], "url": f"{self.run_dir}/state/step-{staged[-1]:08d}-1"} if staged else None

    def read_metrics(self) -> list[dict[str, Any]]:
        return []

    def finish(self) -> dict[str, Any]:
        assert self.is_whole, "ended on what is left of a plan"
        self._note("finish", self.next_step)
        return {"run_dir": self.run_dir, "final": f"{self.run_dir}/final", "staged_state": self.newest_state}

    def _note(self, name: str, step: int) -> dict[str, Any]:
        with self._lock:
            self.calls.append((name, step))
        if self.fail_at == (name, step):
            kind = CommandError if self.losses else RuntimeError
            named = {"device": 1, "label": name} if self.losses else {}
            raise kind(f"device 1 died in {name} of step {step}.", **named)
        time.sleep(self.delay_s)
        return {"seconds": self.delay_s}

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return lambda step: self._note(name, step)


def find_session(run_id: str) -> FakeSession:
    return FakeSession.opened[run_id]
