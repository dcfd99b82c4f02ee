"""Workers whose shards take their time, or fail: what happens to a commit then is tested with them."""

from __future__ import annotations

import os
import time

from nereus.runtime.rank import Rank
from storage.manifest import ShardRecord


class SlowRank(Rank):
    """Before each shard of a folder that has `slow_in` in its name it sleeps `delay_s`; the next `failures` fail."""

    delay_s = 0.0
    slow_in = ""
    failures = 0
    written_from_copies = 0

    def be(self, delay_s: float = 0.0, failures: int = 0, slow_in: str = "") -> None:
        """Set how slow this worker is from now on, and how many of its next shards fail."""
        self.delay_s, self.failures, self.slow_in, self.written_from_copies = delay_s, failures, slow_in, 0

    def write_shard(self, folder: str, file: str) -> ShardRecord:
        """Write a shard late, or not at all."""
        if self.slow_in in folder:
            time.sleep(self.delay_s)
        if self.failures:
            self.failures -= 1
            os.makedirs(folder, exist_ok=True)
            with open(os.path.join(folder, f".{file}.0.writing"), "wb") as torn:
                torn.write(b"torn")
            raise OSError(28, "No space left on device")
        self.written_from_copies += file in self.shards._copies
        return super().write_shard(folder, file)

    def count_written_from_copies(self) -> int:
        """Return how many shards since `be` were written from copies."""
        return self.written_from_copies
