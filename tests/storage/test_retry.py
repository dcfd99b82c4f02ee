"""What is worth another try, and how long it goes on."""

import errno

import pytest
from botocore.exceptions import (
    ClientError,
    ConnectTimeoutError,
    EndpointConnectionError,
    NoCredentialsError,
    ParamValidationError,
    ReadTimeoutError,
    ResponseStreamingError,
    SSLError,
)
from s3fs.errors import translate_boto_error

from storage import retry
from storage.retry import TransientError, as_os_error, is_transient, retried


def answer(status, code):
    error = {"Error": {"Code": code, "Message": "says the server"}, "ResponseMetadata": {"HTTPStatusCode": status}}
    return ClientError(error, "PutObject")


@pytest.fixture
def waits(monkeypatch):
    """No real waits; what was slept, and a clock that it moves."""
    slept = []
    monkeypatch.setattr(retry.time, "sleep", slept.append)
    monkeypatch.setattr(retry.time, "monotonic", lambda: sum(slept))
    monkeypatch.setattr(retry.random, "uniform", lambda low, high: high)
    return slept


def failing(*errors):
    left = list(errors)

    def action():
        if left:
            raise left.pop(0)
        return "done"

    return action


def test_waits_grow_until_it_succeeds(waits):
    assert retried(failing(*[ConnectionResetError()] * 3)) == "done"
    assert waits == [0.5, 1.0, 2.0]


def test_the_last_error_is_raised(waits):
    with pytest.raises(TransientError, match="4"):
        retried(failing(*[TransientError(str(number)) for number in range(1, 6)]))
    assert len(waits) == 3


def test_no_try_begins_after_the_deadline(waits):
    with pytest.raises(TimeoutError):
        retried(failing(*[TimeoutError()] * 10), attempts=10, first_wait_s=10, deadline_s=60)
    assert waits == [10, 20]


def test_what_no_try_can_mend_is_raised_at_once(waits):
    for error in (PermissionError("no"), FileNotFoundError("no"), KeyError("no")):
        with pytest.raises(type(error)):
            retried(failing(error))
    assert waits == []


@pytest.mark.parametrize(
    "error",
    [
        ConnectionResetError("reset"),
        TimeoutError("timeout"),
        TransientError("short"),
        EndpointConnectionError(endpoint_url="http://x"),
        ConnectTimeoutError(endpoint_url="http://x"),
        ReadTimeoutError(endpoint_url="http://x"),
        ResponseStreamingError(error="cut"),
        *(
            translate_boto_error(answer(status, code))
            for status, code in (
                (500, "InternalError"),
                (502, "502"),
                (503, "SlowDown"),
                (503, "ServiceUnavailable"),
                (504, "504"),
                (429, "TooManyRequests"),
                (400, "RequestTimeout"),
                (400, "IncompleteBody"),
                (409, "ConditionalRequestConflict"),
            )
        ),
    ],
)
def test_worth_another_try(error):
    assert is_transient(error)


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        OSError(errno.EIO, "a broken disk"),
        OSError(errno.EBUSY, "a local file"),
        FileExistsError(),
        ValueError(),
        AssertionError(),
        NoCredentialsError(),
        SSLError(endpoint_url="https://x", error="certificate verify failed"),
        *(
            translate_boto_error(answer(status, code))
            for status, code in (
                (403, "AccessDenied"),
                (403, "InvalidAccessKeyId"),
                (403, "SignatureDoesNotMatch"),
                (400, "ExpiredToken"),
                (404, "NoSuchBucket"),
                (404, "NoSuchKey"),
                (412, "PreconditionFailed"),
                (400, "InvalidBucketName"),
                (301, "PermanentRedirect"),
                (501, "NotImplemented"),
            )
        ),
    ],
)
def test_not_worth_another_try(error):
    assert not is_transient(error)


def test_errors_of_a_stores_library_become_os_errors(waits):
    with pytest.raises(OSError, match="Could not connect") as caught:
        retried(failing(*[EndpointConnectionError(endpoint_url="http://x/bucket")] * 9), attempts=2)
    assert isinstance(caught.value.__cause__, EndpointConnectionError)
    assert isinstance(as_os_error(NoCredentialsError()), PermissionError)
    assert type(as_os_error(ParamValidationError(report="bad name"))) is OSError
    error = KeyError("ours")
    assert as_os_error(error) is error
