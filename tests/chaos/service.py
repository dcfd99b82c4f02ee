"""A worker that may be doomed: the real one, with the points of its moments marked."""

from __future__ import annotations

from typing import Any

from nereus.runtime import rank, training, units, weight_sync
from nereus.runtime.worker import WorkerContext
from storage import shard_writer, state_reader, whole_file
from tests.chaos.doom import Reaper, wrap
from tests.runtime.open_rank import OpenRank


class DoomedRank(OpenRank):
    """Kills itself, its driver or both at the point that the environment names."""

    def __init__(self, context: WorkerContext) -> None:
        super().__init__(context)
        self.reaper = Reaper.from_environment(context.device)
        mark_parts(self.reaper)

    def generate(self, work: rank.GenerationWork) -> Any:
        return self.reaper.around("generation", lambda: super(DoomedRank, self).generate(work))

    def train(self, *arguments: Any, **named: Any) -> Any:
        return self.reaper.around("training", lambda: super(DoomedRank, self).train(*arguments, **named))

    def sync_weights(self, *arguments: Any, **named: Any) -> int:
        return self.reaper.around("weight sync", lambda: super(DoomedRank, self).sync_weights(*arguments, **named))

    def write_shard(self, *arguments: Any, **named: Any) -> Any:
        return self.reaper.around("shard write", lambda: super(DoomedRank, self).write_shard(*arguments, **named))

    def restore(self, *arguments: Any, **named: Any) -> Any:
        return self.reaper.around("restore", lambda: super(DoomedRank, self).restore(*arguments, **named))


def mark_parts(reaper: Reaper) -> None:
    """Mark the small parts that the work of a worker consists of."""

    def after(moment: str) -> Any:
        def around(call: Any) -> Any:
            def wrapped(*arguments: Any, **named: Any) -> Any:
                result = call(*arguments, **named)
                reaper.part(moment)
                return result

            return wrapped

        return around

    def torn(call: Any) -> Any:
        def write(self: whole_file.WholeFile, block: Any) -> None:
            call(self, block)
            reaper.part("shard write", done=self.position / self.num_bytes)

        return write

    def put(call: Any) -> Any:
        return lambda *arguments: reaper.while_remote(["shard write"], lambda: call(*arguments))

    wrap(units.DecoderShard, "decode", after("generation"))
    wrap(training.AdamW, "step", after("training"))
    wrap(weight_sync.SliceStore, "find", after("weight sync"))
    wrap(whole_file.WholeFile, "write", torn)
    wrap(shard_writer.ShardWriter, "_put", put)
    wrap(state_reader.StateReader, "feed", after("restore"))
