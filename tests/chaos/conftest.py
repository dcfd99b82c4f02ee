"""Where the runs of these tests lie."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.runs import ChaosRun, Make
from tests.services.seaweed import S3Server


@pytest.fixture
def make_run(tmp_path: Path, request: pytest.FixtureRequest) -> Make:
    """Returns new runs on a kind of storage."""

    def make(storage: str, precision: str, name: str = "run") -> ChaosRun:
        scratch = tmp_path / f"{name}-scratch"
        if storage == "local":
            return ChaosRun(str(tmp_path / name), scratch, precision)
        server: S3Server = request.getfixturevalue("s3_server")
        return ChaosRun(f"{request.getfixturevalue('s3_url')}/{name}", scratch, precision, server.env)

    return make
