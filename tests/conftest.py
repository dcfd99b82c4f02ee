"""Fixtures that all rooms share."""

import os
import time
from collections.abc import Iterator

import pytest

from tests.services.seaweed import s3_server, s3_url  # noqa: F401 (fixtures)

# Before torch is imported: tests share few cores, and results must not hang on how many there are.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("PREFECT_SERVER_ANALYTICS_ENABLED", "false")
os.environ.setdefault("DO_NOT_TRACK", "1")

SEED = 20260101
# Seconds after which no further test begins; what is left is told as skipped.
TESTS_S = float(os.environ.get("NEREUS_TESTS_S", "inf"))
_begun = time.monotonic()


def pytest_runtest_setup() -> None:
    if time.monotonic() - _begun > TESTS_S:
        pytest.skip("this machine is slow: the time for tests was spent before (NEREUS_TESTS_S)")


@pytest.fixture
def seed() -> int:
    """The seed of every drawn number in a test."""
    return SEED


@pytest.fixture(scope="session")
def prefect_api() -> Iterator[None]:
    """A Prefect API with a database of its own, on the ephemeral server; one a session, it takes seconds."""
    from prefect.testing.utilities import prefect_test_harness

    with prefect_test_harness(server_startup_timeout=90):
        yield
