"""The shipped recipe learns, through the real flow and real workers."""

from pathlib import Path

import pytest

from flows.ppo import train_ppo
from nereus.config import load_config
from nereus.report.html import read_metrics
from nereus.report.summary import summarize


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("prefect_api")
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_reward_triples_and_responses_grow(seed: int, tmp_path: Path):
    run_dir = train_ppo(load_config("tiny-cpu", [f"seed={seed}", f"run_dir={tmp_path / 'run'}"]))["run_dir"]
    summary = summarize(read_metrics(run_dir))
    assert summary["reward_first"] >= 0.05
    assert summary["reward_last"] >= 3 * summary["reward_first"]
    assert summary["response_tokens_last"] >= 1.5 * summary["response_tokens_first"]
