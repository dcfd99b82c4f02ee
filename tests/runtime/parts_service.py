"""A worker that sends and receives tensors in parts."""

from __future__ import annotations

import torch

from tests.runtime.services import GroupService


class PartsService(GroupService):
    """Passes parts around a ring."""

    def pass_parts(self, dtype: torch.dtype, target: torch.dtype, rounds: int) -> list[bool]:
        """Send parts of strided matrices to the right neighbour, as `dtype`; return whether those of the left came.

        Each round sends all of them in one message, then each large one in a message of its own.
        """
        group = self._group
        right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        results = []
        for index in range(rounds):
            received = [torch.full_like(part, -1).to(target) for part in _parts(left, index)]
            spread = [torch.full((*part.shape, 2), -1).to(target)[..., 0] for part in received]
            sent = [group.send_parts(_parts(group.rank, index), dtype, right, index)]
            group.recv_parts(spread, dtype, left, index).wait()
            for part, place in zip(_large_parts(group.rank, index), received[3:5], strict=True):
                sent.append(group.send_parts([part.to(dtype)], dtype, right, index))
                group.recv_parts([place], dtype, left, index).wait()
            for each in sent:
                each.wait()
            results += [
                torch.equal(got, part.to(dtype).to(target))
                for got, part in zip(
                    [*spread, *received[3:5]], [*_parts(left, index), *_large_parts(left, index)], strict=True
                )
            ]
        return results


def _large_parts(rank: int, index: int) -> list[torch.Tensor]:
    """Return one that lies in order, and one that doesn't."""
    return _parts(rank, index)[3:5]


def _parts(rank: int, index: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(100 * rank + index)
    wide = torch.rand(300, 700 + index, generator=draw)
    large = torch.rand(900, 700, generator=draw)
    return [wide[:, 7:90], wide[17], wide[:0], large, large[:, 1:], wide[3:200]]
