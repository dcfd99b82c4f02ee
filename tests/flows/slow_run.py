"""A process with a flow run that never ends: `python slow_run.py RUN_DIR [NUM_PRIMITIVES]`.

It trains for ever, or is in the midst of a change of the plan for ever, and prints when it has come that far.
"""

import faulthandler
import signal
import sys
import time
from typing import Any

import flows.ppo
import tasks.adapt
import tasks.ppo
import tasks.transition
from flows.local import run_here
from nereus.config import load_config
from tests.flows.fake_session import FakeSession, find_session
from tests.flows.fake_transition import FakeTransition, random_graph


class SlowSession(FakeSession):
    """What it waits for ends only when it is closed, as a wait for workers does."""

    def train_actor(self, step: int) -> dict[str, Any]:
        print("in training", flush=True)
        self.wait()
        return {}

    def begin_transition(self, step: int) -> FakeTransition:
        transition = SlowTransition(step, self.graphs[step])
        transition.session = self
        self.transitions.append(transition)
        return transition

    def wait(self) -> None:
        while not self.closed:
            time.sleep(0.05)
        raise RuntimeError("the workers are gone")


class SlowTransition(FakeTransition):
    session: SlowSession

    def run_primitive(self, id: str) -> dict[str, Any]:
        with self._lock:
            if not self.ended:
                self.ended.append(id)
                print("in a primitive", flush=True)
        self.session.wait()
        return {}


if __name__ == "__main__":
    faulthandler.register(signal.SIGUSR1)
    if len(sys.argv) > 2:
        SlowSession.graphs[0] = random_graph(seed=4, num_primitives=int(sys.argv[2]))
    flows.ppo.Session = SlowSession
    for module in (tasks.adapt, tasks.ppo, tasks.transition):
        module.find_session = find_session
    try:
        run_here(load_config("tiny-cpu", [f"run_dir={sys.argv[1]}"]))
    except KeyboardInterrupt:
        print("stopped", flush=True)
