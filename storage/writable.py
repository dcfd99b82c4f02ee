"""A check at the door: may we write here, and if not, what is to be done about it."""

from __future__ import annotations

import contextlib
import errno
import os
import posixpath
import uuid
from typing import Any

from storage.errors import describe_error, hide_credentials, refuse_credentials
from storage.retry import answer_of, as_os_error, is_transient
from storage.small_files import remove_folder
from storage.urls import local_path, open_filesystem

LIMIT_S = 10  # for each of the few requests
_BAD_CREDENTIALS = (
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidToken",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
)
_PROBE = b"probe"


def check_writable(url: str | os.PathLike[str], *, field: str = "run_dir") -> None:
    """Put a small file into a folder, list it, read it and remove it; nothing of it stays.

    An endpoint that can't be reached is given up within about ten seconds.

    Args:
        url: the folder; it need not exist.
        field: of the config, for the sentence.

    Raises:
        ValueError: it can't be done, or the URL holds credentials, which would get into files and logs; one sentence
            says why and what to do, without credentials.
    """
    refuse_credentials(os.fspath(url), field)
    try:
        path = local_path(url)
        if path is not None:
            _probe_folder(path)
        else:
            _probe_store(os.fspath(url))
    except Exception as error:  # every store has errors of its own
        where = hide_credentials(os.fspath(url))
        raise ValueError(f"{field}: {where} can't be written {describe_access(error)}.") from error


def describe_access(error: Exception) -> str:
    """Return what keeps us from a place and what the user can do, as `(WHAT); MEND`, without credentials."""
    cause = error.__cause__
    # What never reached the store says more before it was translated.
    if isinstance(cause, Exception) and as_os_error(cause) is not cause and not answer_of(error)[1]:
        error = cause
    return f"({_what(error)}); {_mend(error)}"


def _probe_folder(path: str) -> None:
    made: list[str] = []
    folder = os.path.abspath(path)
    while not os.path.lexists(folder):
        made.append(folder)
        folder = os.path.dirname(folder)
    probe = os.path.join(path, f".probe-{uuid.uuid4().hex}")
    try:
        os.makedirs(path, exist_ok=True)
        try:
            with open(probe, "xb") as file:
                file.write(_PROBE)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(probe)
    finally:
        for one in made:
            with contextlib.suppress(OSError):
                os.rmdir(one)


def _probe_store(url: str) -> None:
    filesystem, folder = open_filesystem(url, patient=False)
    limit: dict[str, Any] = {"timeout": LIMIT_S} if filesystem.async_impl else {}
    probe = posixpath.join(folder, f".probe-{uuid.uuid4().hex}")
    filesystem.pipe_file(probe, _PROBE, **limit)
    try:
        filesystem.invalidate_cache(folder)
        names = filesystem.ls(folder, detail=False, **limit)
        if not any(posixpath.basename(name) == posixpath.basename(probe) for name in names):
            raise OSError(errno.EIO, "what was put there is not listed")
        if filesystem.cat_file(probe, **limit) != _PROBE:
            raise OSError(errno.EIO, "what was put there came back altered")
    finally:
        filesystem.rm_file(probe)
    if "/" in folder.strip("/"):  # a bucket itself stays
        remove_folder(url)


def _what(error: Exception) -> str:
    if isinstance(error, FileNotFoundError) and answer_of(error)[1]:
        return "there is no such bucket"
    if isinstance(error, FileExistsError | NotADirectoryError):
        return "it is, or lies in, a file"
    return describe_error(as_os_error(error))


def _mend(error: Exception) -> str:
    """Return what the user can do."""
    code = answer_of(error)[1]
    if code in _BAD_CREDENTIALS:
        return "renew or correct the credentials"
    if code and isinstance(error, FileNotFoundError):
        return "make it, or name another"
    if code and isinstance(error, PermissionError):
        return "use credentials that may put, list, get and delete objects there, or choose another place"
    if isinstance(as_os_error(error), PermissionError) and not isinstance(error, OSError):
        return "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or use another of the usual sources of AWS credentials"
    if is_transient(error):
        return "check the endpoint (AWS_ENDPOINT_URL_S3) and the network"
    if isinstance(error, OSError) and error.errno == errno.ENOSPC:
        return "free some space, or choose another place"
    return "choose another place"
