"""Doing it again: what went wrong on the way to a remote store, with growing waits and an end."""

from __future__ import annotations

import errno
import logging
import random
import time
from collections.abc import Callable
from typing import Any, TypeVar

from storage.errors import describe_error

T = TypeVar("T")
_log = logging.getLogger(__name__)

# Libraries whose errors come through fsspec untranslated.
_STORE_LIBRARIES = ("botocore", "aiobotocore", "aiohttp", "urllib3", "gcsfs", "google", "adlfs", "azure", "requests")
# Their error classes that mean "the way there failed", by name, since most of these libraries are not installed.
_LOST_ON_THE_WAY = {
    "ConnectionError",  # botocore and requests
    "HTTPClientError",  # botocore: closed connections, timeouts
    "ResponseStreamingError",
    "IncompleteReadError",
    "ResponseParserError",  # an overloaded proxy answers with a page that is no XML
    "AioConnectionError",
    "ClientConnectionError",  # aiohttp
    "ClientPayloadError",
    "ProtocolError",  # urllib3
    "Timeout",  # requests
}
_NEVER_TRANSIENT = {"SSLError", "SSLCertVerificationError", "InvalidProxiesConfigError"}
_WORTH_ANOTHER_TRY = {
    *("SlowDown", "RequestTimeout", "IncompleteBody", "BadDigest", "XAmzContentSHA256Mismatch"),
    *("ConditionalRequestConflict", "OperationAborted"),  # two puts at the same time: ask again who has won
}
_NO_CREDENTIALS = {"NoCredentialsError", "PartialCredentialsError", "CredentialRetrievalError", "TokenRetrievalError"}


class TransientError(OSError):
    """What another try may mend, such as a body that came back short."""


def is_transient(error: BaseException) -> bool:
    """Return whether a remote store may answer another try: after 5xx, resets, timeouts and cut bodies.

    Never after errors of a local disk, wrong or expired credentials, missing buckets and refused permissions.
    """
    if isinstance(error, FileNotFoundError | FileExistsError | PermissionError):
        return False
    if isinstance(error, TransientError | ConnectionError | TimeoutError):
        return True
    names = {kind.__name__ for kind in type(error).__mro__ if kind.__module__.startswith(_STORE_LIBRARIES)}
    if names & _NEVER_TRANSIENT:
        return False
    status, code = answer_of(error)
    # 501 says that the server doesn't know such a request: it won't learn it.
    return (
        bool(names & _LOST_ON_THE_WAY)
        or status == 429
        or (status >= 500 and status != 501)
        or code in _WORTH_ANOTHER_TRY
    )


def retried(
    action: Callable[[], T],
    *,
    attempts: int = 4,
    first_wait_s: float = 0.5,
    deadline_s: float = 60.0,
    is_transient: Callable[[BaseException], bool] = is_transient,
) -> T:
    """Return what `action` returns, called again after an error that is transient.

    Args:
        action: has to be safe to do twice.
        attempts: calls at most.
        first_wait_s: between the first two calls; doubled each time, drawn down by up to half.
        deadline_s: no call starts later than this after the first.
        is_transient: tells which errors are worth another call.

    Raises:
        OSError: the last error; what a store's library raises in classes of its own becomes one.
        Exception: any other error of `action`, as it is.
    """
    end = time.monotonic() + deadline_s
    for attempt in range(1, attempts + 1):
        try:
            return action()
        except Exception as error:
            wait_s = first_wait_s * 2 ** (attempt - 1) * random.uniform(0.5, 1.0)
            if attempt == attempts or not is_transient(error) or time.monotonic() + wait_s > end:
                translated = as_os_error(error)
                if translated is error:
                    raise
                raise translated from error
            _log.info("try %d of %d failed, next in %.1f s: %s", attempt, attempts, wait_s, describe_error(error))
        time.sleep(wait_s)
    raise AssertionError("attempts must be at least 1")


def as_os_error(error: Exception) -> Exception:
    """Return the error of a store's library as an OSError; any other as it is."""
    if isinstance(error, OSError) or not type(error).__module__.startswith(_STORE_LIBRARIES):
        return error
    if any(kind.__name__ in _NO_CREDENTIALS for kind in type(error).__mro__):
        return PermissionError(errno.EACCES, describe_error(error))
    return OSError(errno.EIO, describe_error(error))


def answer_of(error: BaseException) -> tuple[int, str]:
    """Return the HTTP status and the error code of the answer behind an error; 0 and "" where there is none."""
    for one in (error, error.__cause__):
        answer: Any = getattr(one, "response", None)
        if isinstance(answer, dict):
            status = answer.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return int(status), str(answer.get("Error", {}).get("Code", ""))
        for name in ("status", "status_code", "code"):
            if type(one).__module__.startswith(_STORE_LIBRARIES) and isinstance(getattr(one, name, None), int):
                return int(getattr(one, name)), ""
    return 0, ""
