"""Our side of the PPO benchmark, in a process of its own: `python -m tests.benchmarks.ppo_nereus SPEC.json OUT.json`.

Drives a session step by step, as the flow does, without the orchestrator.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

# The tasks of a step, in order, by stage.
TASKS = {
    "generate": "generation",
    "score": "inference",
    "infer_reference": "inference",
    "infer_logprobs": "inference",
    "infer_values": "inference",
    "estimate_advantages": "inference",
    "train_actor": "training",
    "train_critic": "training",
    "sync_weights": "other",
}


def main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    # As many cores as threads, for this driver and its workers alike.
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["threads"]])
    with tempfile.TemporaryDirectory() as folder:
        steps = run(spec, folder)
    Path(out_path).write_text(json.dumps({"steps": steps}))


def run(spec: dict[str, Any], folder: str) -> list[dict[str, Any]]:
    """Return one record a measured step; seconds by stage, and by task of the flow (wall and processor time)."""
    from nereus.config import build_config
    from nereus.runtime.session import Session

    with Session.open(build_config(config_tree(spec, folder)), run_id="bench") as session:
        records = [run_step(session, step, spec) for step in session.steps]
    return records[spec["warm_up"] :]


def config_tree(spec: dict[str, Any], folder: str) -> dict[str, Any]:
    work = spec["work"]
    return {
        "model": {"path": spec["model"]},
        "critic": {"path": spec["reward"]},
        "reward": {"model": spec["reward"]},
        "data": {"prompts": spec["prompts"]},
        "rollout": {
            "prompts_per_step": work["prompts"],
            "max_prompt_tokens": work["prompt_tokens"],
            "max_response_tokens": work["response_tokens"],
            "stop_at_eos": False,
        },
        "ppo": {"epochs": 1, "minibatches": work["minibatches"]},
        "precision": work["precision"],
        "steps": spec["warm_up"] + work["steps"],
        "run_dir": os.path.join(folder, "run"),
        "cluster": {
            "devices": spec["workers"],
            "threads_per_device": spec["threads"] // spec["workers"],
            "memory_per_device": spec["memory_bytes"] // spec["workers"],
        },
    }


def run_step(session: Any, step: int, spec: dict[str, Any]) -> dict[str, Any]:
    tasks, stages_cpu = {}, dict.fromkeys(("generation", "inference", "training", "other"), 0.0)
    started, pids = time.perf_counter(), session.worker_pids().values()
    for task, stage in TASKS.items():
        begun, cpu_begun = time.perf_counter(), cpu_seconds(pids)
        getattr(session, task)(step)
        tasks[task] = time.perf_counter() - begun
        stages_cpu[stage] += cpu_seconds(pids) - cpu_begun
    line = session.finish_step(step)
    total = time.perf_counter() - started
    assert line["response_tokens_mean"] == spec["work"]["response_tokens"], line
    stages = {stage: line["seconds"][stage] for stage in ("generation", "inference", "training")}
    return {
        "ended_unix_s": time.time(),
        "seconds": {**stages, "other": total - sum(stages.values()), "total": total},
        "cpu_seconds": {**stages_cpu, "total": sum(stages_cpu.values())},
        "tasks": tasks,
        "first_ratio_max_error": line["first_ratio_max_error"],
        "peak_memory_bytes": sum(line["peak_memory_bytes"].values()),
    }


def cpu_seconds(pids: Iterable[int]) -> float:
    """Return the processor time of this process and these; little of it in a long wall time means a busy machine."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK") + time.process_time()


if __name__ == "__main__":
    main(*sys.argv[1:])
