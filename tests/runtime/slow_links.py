"""Workers whose messages take long to leave, or one of which computes slowly."""

from __future__ import annotations

import time
from collections.abc import Sequence
from unittest.mock import patch

import torch
from torch import Tensor

from nereus.runtime.communicator import Communicator, Pending
from nereus.runtime.probe_compute import ComputeOrder, ComputeSpeeds
from nereus.runtime.probe_work import ProbeOrder, ProbeResult
from nereus.runtime.rank import Rank

SEND_S = 0.05


class SlowLinks(Rank):
    """The real worker on a slow network."""

    def probe(self, order: ProbeOrder) -> ProbeResult:
        send = Communicator.send_parts

        def slow(
            communicator: Communicator, parts: Sequence[Tensor], dtype: torch.dtype, dst: int, tag: int = 0
        ) -> Pending:
            time.sleep(SEND_S)
            return send(communicator, parts, dtype, dst, tag)

        with patch.object(Communicator, "send_parts", slow):
            return super().probe(order)


class SlowCompute(Rank):
    """The real worker, but for what the one of device 1 says of itself."""

    def probe_compute(self, order: ComputeOrder) -> ComputeSpeeds:
        speeds = super().probe_compute(order)
        return ComputeSpeeds(1e7, 1e6) if self.context.device == 1 else speeds
