"""How a communicator waits: it polls, it notices an abort or a dead peer, and it never hangs."""

import os
import select
import time
from collections.abc import Callable, Mapping
from typing import Protocol

# Peers on cores of their own answer within this time; after it the core is better left to somebody else.
_SPIN_S = 200e-6
_FIRST_PAUSE_S = 50e-6
_LONGEST_PAUSE_S = 500e-6


# The longest wait for peers: a peer may be in a long stage, and a dead or stopped one is found
# sooner by other means; this ends the waits that ranks which disagree would otherwise share for ever.
WAIT_LIMIT_S = 600.0


class AbortFlag(Protocol):
    """What `threading.Event` offers and communicators use of it."""

    def is_set(self) -> bool:
        """Return whether all waits must end."""


class CommunicatorError(RuntimeError):
    """A collective or a transfer can't be completed, since a peer is gone or does something else."""


class CommunicatorAborted(CommunicatorError):
    """The abort flag was set while, or before, a rank waited for its peers."""


class PeerWatch:
    """Tells whether waiting still makes sense: no abort, and all peers on this host alive."""

    def __init__(self, abort: AbortFlag) -> None:
        self.abort = abort
        self._poll = select.poll()
        self._ranks: dict[int, tuple[int, int]] = {}

    def add_peers(self, pids: Mapping[int, int]) -> None:
        """Watch the processes `pids[rank]` too.

        Raises:
            CommunicatorError: one of them has ended already.
        """
        for rank, pid in pids.items():
            try:
                handle = os.pidfd_open(pid)  # readable once the process has ended; never another process of that id
            except ProcessLookupError as error:
                raise CommunicatorError(f"rank {rank} (process {pid}) has ended") from error
            self._ranks[handle] = (rank, pid)
            self._poll.register(handle, select.POLLIN)

    def check(self) -> None:
        """Raise if waiting is in vain.

        Raises:
            CommunicatorAborted: the abort flag is set.
            CommunicatorError: a watched peer has ended.
        """
        if self.abort.is_set():
            raise CommunicatorAborted("the command was aborted while it waited for its peers")
        if ended := self._poll.poll(0):
            rank, pid = self._ranks[ended[0][0]]
            raise CommunicatorError(f"rank {rank} (process {pid}) has ended")

    def close(self) -> None:
        """Let go of the watched processes."""
        for handle in self._ranks:
            os.close(handle)
        self._ranks.clear()
        self._poll = select.poll()


def wait_until(ready: Callable[[], bool], watch: PeerWatch, describe: Callable[[], str]) -> None:
    """Return as soon as `ready()` is true: at first by spinning, later with short sleeps.

    Spinning yields the core each time, so that more workers than cores don't starve the one they wait for.

    Args:
        ready: whether the wait is over.
        watch: of the group's peers.
        describe: says what waits for whom, such as "rank 0 waits for rank 1 in a barrier"; called on failure only.

    Raises:
        CommunicatorAborted: the abort flag was set.
        CommunicatorError: a watched peer has ended, or `WAIT_LIMIT_S` seconds have passed.
    """
    started = time.perf_counter()
    while time.perf_counter() - started < _SPIN_S:
        if ready():
            return
        os.sched_yield()
    pause_s = _FIRST_PAUSE_S
    while not ready():
        try:
            watch.check()
        except CommunicatorAborted:
            raise
        except CommunicatorError:
            if ready():  # the peer answered before it ended
                return
            raise
        if time.perf_counter() - started > WAIT_LIMIT_S:
            raise CommunicatorError(f"{describe()}, in vain for {WAIT_LIMIT_S:g} s")
        time.sleep(pause_s)
        pause_s = min(1.2 * pause_s, _LONGEST_PAUSE_S)
