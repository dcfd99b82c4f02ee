"""The check at the door: what is wrong with a place, in one sentence with the mend, in time, without secrets."""

import os
import socket
import time

import pytest

from storage.errors import refuse_credentials
from storage.s3 import BoundedS3FileSystem
from storage.small_files import list_names, replace_file
from storage.writable import check_writable
from tests.services.fault_proxy import Fault, run_fault_proxy


@pytest.fixture(autouse=True)
def fresh_clients():
    """Clients remember the credentials that they were made with."""
    BoundedS3FileSystem.clear_instance_cache()
    yield
    BoundedS3FileSystem.clear_instance_cache()


def refusal(url, **options):
    with pytest.raises(ValueError) as caught:
        check_writable(url, **options)
    sentence = str(caught.value)
    assert sentence.startswith("run_dir: ")
    assert sentence.endswith(".")
    assert "\n" not in sentence
    assert "secret" not in sentence
    return sentence


def test_a_good_place_is_left_as_it_was(store_url):
    check_writable(f"{store_url}/new")
    assert list_names(store_url) == []
    replace_file(f"{store_url}/old/x", b"")
    check_writable(f"{store_url}/old")
    assert list_names(f"{store_url}/old") == ["x"]


def test_a_bucket_itself(s3_url, s3_server):
    check_writable(s3_server.url)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://who:secret@bucket/run", "s3://bucket/run"),
        ("ftp://who@host/run", "ftp://host/run"),
        ("https://host/run?version=1&X-Amz-Signature=secret", "https://host/run"),
    ],
)
def test_credentials_in_a_place_are_refused(url, shown):
    """They would be written into run.yaml and the journal."""
    sentence = refusal(url)
    assert sentence.startswith(f"run_dir: {shown} was given with credentials in it")
    assert "set them in the environment" in sentence


def test_a_bucket_may_be_named_like_a_user(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "minioadmin")
    check_writable("memory://minioadmin-data/run")


def test_a_version_is_no_secret():
    refuse_credentials("s3://bucket/prompts.jsonl?versionId=abc", "data.prompts")


def test_a_file_in_the_way(tmp_path):
    (tmp_path / "x").touch()
    for path in (tmp_path / "x", tmp_path / "x" / "run"):
        assert "a file); choose another place." in refusal(str(path))


def test_a_folder_that_may_not_be_written(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise PermissionError(13, "Permission denied", str(tmp_path))

    monkeypatch.setattr("builtins.open", refuse)
    assert "Permission denied" in refusal(str(tmp_path))


def test_a_full_disk(tmp_path, monkeypatch):
    def refuse(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("builtins.open", refuse)
    assert "free some space" in refusal(str(tmp_path / "new"))
    assert os.listdir(tmp_path) == []


def test_an_unknown_store():
    assert "choose another place" in refusal("nowhere://bucket/run")


def test_a_missing_bucket(s3_url):
    assert refusal("s3://no-such-bucket/run") == (
        "run_dir: s3://no-such-bucket/run can't be written (there is no such bucket); make it, or name another."
    )


def test_a_name_that_no_bucket_has(s3_url):
    assert "choose another place" in refusal("s3://No_Bucket/run")


def test_a_bucket_that_may_only_be_read(s3_url, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", s3_server.reader_key)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", s3_server.reader_secret)
    assert "use credentials that may put, list, get and delete objects there" in refusal(s3_url)


def test_wrong_credentials(s3_url, s3_server, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "another-secret")
    assert "renew or correct the credentials" in refusal(s3_url)
    BoundedS3FileSystem.clear_instance_cache()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "another-key")
    assert "renew or correct the credentials" in refusal(s3_url)


def test_missing_credentials(s3_url, monkeypatch, tmp_path):
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    for name in ("AWS_CONFIG_FILE", "AWS_SHARED_CREDENTIALS_FILE"):
        monkeypatch.setenv(name, str(tmp_path / "none"))
    assert "set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY" in refusal(s3_url)


def test_expired_credentials(s3_url, s3_server, monkeypatch):
    with run_fault_proxy(s3_server.endpoint) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", proxy.endpoint)
        proxy.inject(Fault("error", None, 403, "ExpiredToken", message="The provided token has expired."))
        assert "The provided token has expired); renew or correct the credentials" in refusal(s3_url)
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_server.endpoint)


def test_nobody_answers_at_the_endpoint(s3_url, s3_server, monkeypatch):
    with socket.socket() as taken:  # bound, not listening: connections are refused
        taken.bind(("127.0.0.1", 0))
        with monkeypatch.context() as patch:
            patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{taken.getsockname()[1]}")
            assert "check the endpoint (AWS_ENDPOINT_URL_S3) and the network" in refusal(s3_url)


def test_a_silent_endpoint_is_given_up(s3_url, s3_server, monkeypatch):
    """It takes the connection and never answers."""
    with socket.socket() as silent, monkeypatch.context() as patch:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        patch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{silent.getsockname()[1]}")
        patch.setattr("storage.urls.SHORT_TIMEOUTS", {"connect_timeout": 0.5, "read_timeout": 0.5})
        begin = time.monotonic()
        assert "check the endpoint" in refusal(s3_url)
        assert time.monotonic() - begin < 9  # not by the limit of the check, which would be the last resort


def test_another_field_is_named(tmp_path):
    (tmp_path / "x").touch()
    with pytest.raises(ValueError, match=r"^staging\.root: "):
        check_writable(str(tmp_path / "x"), field="staging.root")
