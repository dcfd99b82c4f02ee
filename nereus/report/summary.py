"""What a run came to, in a few numbers."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

WINDOW = 5


def summarize(history: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return first and last values of a run.

    Means are over the first and last `window` steps: 5, or half of a short run. Absent numbers are NaN.
    Keys: steps, window, reward_first, reward_last, response_tokens_first, response_tokens_last, kl_k1_last,
    rollout_tokens, seconds, tokens_per_s (response tokens a second of whole steps), skipped_updates.
    """

    def mean(key: str, part: slice) -> float:
        values = [line[key] for line in history[part] if line.get(key) is not None]
        return float(np.mean(values)) if values else float("nan")

    window = max(1, min(WINDOW, len(history) // 2))
    first, last = slice(0, window), slice(-window, None)
    seconds = float(sum(line.get("seconds", {}).get("total", 0.0) for line in history))
    tokens = int(sum(line.get("rollout_tokens", 0) for line in history))
    return {
        "steps": len(history),
        "window": window,
        "reward_first": mean("reward_mean", first),
        "reward_last": mean("reward_mean", last),
        "response_tokens_first": mean("response_tokens_mean", first),
        "response_tokens_last": mean("response_tokens_mean", last),
        "kl_k1_last": mean("kl_k1", last),
        "rollout_tokens": tokens,
        "seconds": seconds,
        "tokens_per_s": tokens / seconds if seconds else float("nan"),
        "skipped_updates": int(sum(line.get("skipped_updates", 0) for line in history)),
    }
