"""Local paths and fsspec URLs: one way to tell them apart and to open them."""

from __future__ import annotations

import functools
import os
import posixpath
from typing import Any

import fsspec.config
from fsspec import AbstractFileSystem
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

_S3_ATTEMPTS = 3  # of one request, made by botocore; what is worth more is tried again by `storage.retry`
TIMEOUTS = {"connect_timeout": 5, "read_timeout": 15}  # in seconds, without a byte
SHORT_TIMEOUTS = {"connect_timeout": 4, "read_timeout": 8}


def open_filesystem(url: str | os.PathLike[str], *, patient: bool = True) -> tuple[AbstractFileSystem, str]:
    """Return the file system of a path or URL, and the path inside it.

    Listings of S3 are not cached, and every request to it ends in bounded time (a minute or so when the server hangs),
    unless the user has set other limits in the environment, in the AWS config file or in fsspec's config.

    Args:
        url: a path or fsspec URL.
        patient: False makes one short attempt of every request to S3, for a check at the door.
    """
    text = os.fspath(url)
    if "::" in text or not text.startswith(("s3://", "s3a://")):
        return url_to_fs(text)
    from storage.s3 import BoundedS3FileSystem as S3  # takes half a second, which local runs are spared

    return S3(**S3._get_kwargs_from_urls(text), **_s3_options(patient)), S3._strip_protocol(text)


def local_path(url: str | os.PathLike[str]) -> str | None:
    """Return the path of a file on this machine, or None for a URL of another store."""
    filesystem, path = open_filesystem(url)
    return path if isinstance(filesystem, LocalFileSystem) else None


def is_s3(filesystem: AbstractFileSystem) -> bool:
    """Return whether a file system is s3fs, whose calls take S3's own options."""
    return "s3" in filesystem.protocol


def join_url(url: str | os.PathLike[str], name: str) -> str:
    """Return the path or URL of `name` inside the folder `url`."""
    return posixpath.join(os.fspath(url), name)


def _s3_options(patient: bool) -> dict[str, Any]:
    """Return what s3fs is opened with: our limits, and over them what the user has set."""
    user = {**fsspec.config.conf.get("s3a", {}), **fsspec.config.conf.get("s3", {})}
    config: dict[str, Any] = dict(TIMEOUTS)
    places = (os.environ.get("AWS_PROFILE"), os.environ.get("AWS_CONFIG_FILE"))
    if "AWS_MAX_ATTEMPTS" not in os.environ and not _max_attempts_configured(*places):
        config["retries"] = {"total_max_attempts": _S3_ATTEMPTS}
    config.update(user.get("config_kwargs", {}))
    if not patient:
        config.update(SHORT_TIMEOUTS, retries={"total_max_attempts": 1})
    options: dict[str, Any] = {"use_listings_cache": False, "config_kwargs": config}
    # Instances are cached by what they are opened with: the endpoint belongs to it, the environment may name another.
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if endpoint and "endpoint_url" not in {**user, **user.get("client_kwargs", {})}:
        options["endpoint_url"] = endpoint
    return options


@functools.cache
def _max_attempts_configured(profile: str | None, config_file: str | None) -> bool:
    """Return whether the AWS config file says how often botocore tries; the arguments are what its answer hangs on."""
    from botocore.exceptions import BotoCoreError
    from botocore.session import Session

    try:
        return "max_attempts" in Session().get_scoped_config()
    except BotoCoreError:  # no such profile: said when the store is opened
        return False
