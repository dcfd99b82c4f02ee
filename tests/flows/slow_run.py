"""A process with a flow run that trains for ever: `python slow_run.py RUN_DIR`. Prints when it is in training."""

import sys
import time
from typing import Any

import flows.ppo
import tasks.ppo
from flows.local import run_here
from nereus.config import load_config
from tests.flows.fake_session import FakeSession, find_session


class SlowSession(FakeSession):
    """Its train_actor ends only when the session is closed, as a wait for workers does."""

    def train_actor(self, step: int) -> dict[str, Any]:
        print("in training", flush=True)
        while not self.closed:
            time.sleep(0.05)
        raise RuntimeError("the workers are gone")


if __name__ == "__main__":
    flows.ppo.Session = SlowSession
    tasks.ppo.find_session = find_session
    try:
        run_here(load_config("tiny-cpu", [f"run_dir={sys.argv[1]}"]))
    except KeyboardInterrupt:
        print("stopped", flush=True)
