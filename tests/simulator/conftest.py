"""Small worlds that simulate in seconds."""

from typing import Any

import pytest

from nereus.simulator.scenario import Scenario

SMALL: dict[str, Any] = {
    "model": {"preset": "smollm2-135m"},
    "cluster": {"preset": "a100-64gb-hdr", "devices": 8},
    "workload": {"prompts_per_step": 64, "prompt_tokens": 128, "response_tokens": 500},
    "steps": 5,
}


def small_scenario(**changes: Any) -> Scenario:
    """Return a small scenario with some keys replaced."""
    return Scenario.model_validate({**SMALL, **changes})


@pytest.fixture(scope="session")
def small() -> Any:
    return small_scenario
