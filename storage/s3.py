"""S3 through s3fs, with an end to every wait: imported only where an `s3://` URL is opened."""

from __future__ import annotations

import asyncio
from typing import Any

from botocore.handlers import add_expect_header
from s3fs import S3FileSystem

_BACKOFF_S = 15.0  # that botocore may take between the attempts of a call
SLOWEST_BYTES_PER_S = 256 * 2**10  # a connection that brings up less is given up


class BoundedS3FileSystem(S3FileSystem):
    """s3fs whose requests can't hang, whose listings are fresh, and which leaves trying again to botocore.

    botocore's timeouts see a server that is silent while an answer is waited for. They don't see one that is silent
    when a body is to be sent: with "Expect: 100-continue" aiohttp waits without end for leave to send, and without it
    for room in the connection. So that header isn't sent, and every call has a limit.
    """

    retries = 1  # s3fs's own, on top of botocore's, would multiply the waits

    async def set_session(self, refresh: bool = False, kwargs: Any = None) -> Any:
        client = await super().set_session(refresh=refresh)
        client.meta.events.unregister("before-call.s3", add_expect_header)
        return client

    _connect = set_session

    async def _call_s3(self, method: str, *akwarglist: Any, **kwargs: Any) -> Any:
        body = kwargs.get("Body")
        num_bytes = len(body) if isinstance(body, bytes | bytearray | memoryview) else 0
        limit_s = self._limit_s() + num_bytes / SLOWEST_BYTES_PER_S
        return await asyncio.wait_for(super()._call_s3(method, *akwarglist, **kwargs), limit_s)

    def _limit_s(self) -> float:
        """Return how long a call may take with all its attempts, besides the time for its body."""
        config = self.config_kwargs
        attempts = config.get("retries", {}).get("total_max_attempts", 5)
        silence_s = config.get("connect_timeout", self.connect_timeout) + config.get("read_timeout", self.read_timeout)
        return _BACKOFF_S + attempts * silence_s
