"""What a store's errors are called in one sentence that may go to a terminal and a log."""

from __future__ import annotations

import os
import re

_CREDENTIALS = re.compile(r"(?<=//)[^/@\s]+@|[^\s/@:'\"(]+:[^\s/@]+@")
_QUERY = re.compile(r"(?<=[^\s?])\?[^\s'\"]*=[^\s'\")]*")
_SIGNED = re.compile(r"\?.*(sig|token|credential|secret|passw|key)[^=&]*=", re.IGNORECASE)
_NUMBER = re.compile(r"\[Errno -?\d+\] ")
_SECRETS = ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")
_MAX_CHARS = 300


def hide_credentials(text: str) -> str:
    """Return a text with URLs that show neither a user (`s3://key:secret@...`) nor a query (a signature).

    The credentials that the environment holds are not in it either: servers repeat them in what they answer.
    """
    for name in _SECRETS:
        value = os.environ.get(name, "")
        if len(value) >= 8:  # shorter ones are words of everyday in tests
            text = text.replace(value, "***")
    return _QUERY.sub("", _CREDENTIALS.sub("", text))


def refuse_credentials(url: str, field: str) -> None:
    """Raise ValueError when a URL names a user or brings a signature along; a local path never does.

    What a config says of places gets into files, logs and artifacts.
    """
    if "://" in url and (_CREDENTIALS.search(url) or _SIGNED.search(url)):
        raise ValueError(
            f"{field}: {hide_credentials(url)} was given with credentials in it, which would get into files and logs; "
            "leave them out, and set them in the environment or in the store's own configuration."
        )


def describe_error(error: BaseException) -> str:
    """Return what an error of any store says on one line without credentials; its kind where it says nothing."""
    if isinstance(error, FileNotFoundError):
        return "there is no such file"
    text = _NUMBER.sub("", " ".join(hide_credentials(str(error)).split())).rstrip(".")
    kind = "" if isinstance(error, OSError | ImportError | ValueError) and text else type(error).__name__
    text = text if len(text) <= _MAX_CHARS else text[: _MAX_CHARS - 3] + "..."
    return ": ".join(part for part in (kind, text) if part)
