"""How S3 is opened: with limits of ours, under those of the user."""

import fsspec.config
import pytest

from storage.urls import local_path, open_filesystem


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch, tmp_path):
    for name in ("AWS_MAX_ATTEMPTS", "AWS_PROFILE", "AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(fsspec.config, "conf", {})


def limits(**options):
    return open_filesystem("s3://bucket/x", **options)[0].config_kwargs


def test_every_request_ends():
    assert limits() == {"connect_timeout": 5, "read_timeout": 15, "retries": {"total_max_attempts": 3}}
    assert limits(patient=False)["retries"] == {"total_max_attempts": 1}
    filesystem, path = open_filesystem("s3://bucket/x")
    assert path == "bucket/x"
    assert filesystem.retries == 1
    assert not filesystem.dircache.use_listings_cache


def test_what_the_user_has_set_stays(monkeypatch, tmp_path):
    conf = {"s3": {"config_kwargs": {"read_timeout": 99}, "use_listings_cache": True}}
    monkeypatch.setattr(fsspec.config, "conf", conf)
    assert limits()["read_timeout"] == 99
    assert limits()["connect_timeout"] == 5
    monkeypatch.setenv("AWS_MAX_ATTEMPTS", "9")
    assert "retries" not in limits()


def test_attempts_in_the_config_file_stay(tmp_path):
    (tmp_path / "config").write_text("[default]\nmax_attempts = 9\n")
    assert "retries" not in limits()


def test_another_endpoint_is_another_client(monkeypatch):
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://a:1")
    first = open_filesystem("s3://bucket")[0]
    assert first.endpoint_url == "http://a:1"
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b:1")
    second = open_filesystem("s3://bucket")[0]
    assert second.endpoint_url == "http://b:1"
    assert open_filesystem("s3://bucket")[0] is second


def test_an_endpoint_of_the_users_config_wins(monkeypatch):
    monkeypatch.setattr(fsspec.config, "conf", {"s3": {"endpoint_url": "http://mine:1"}})
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://b:1")
    assert open_filesystem("s3://bucket")[0].endpoint_url == "http://mine:1"


def test_local_paths(tmp_path):
    assert local_path(tmp_path) == local_path(f"file://{tmp_path}") == str(tmp_path)
    assert local_path("memory://x") is None
    assert local_path("s3://bucket/x") is None
