"""Decode speed of one worker against transformers' `generate`: same weights, precision, threads, prompts and length.

Run `python -m tests.benchmarks.decode [--model DIR] [--json FILE]`. Both sides take turns in one process, so that a
noisy machine disturbs both alike; the ratio of medians is the result. Both decode greedily; the last column is our
sampling at temperature 1, which is what a PPO step uses.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from nereus.layout import Layout
from nereus.model.checkpoint import read_spec
from nereus.model.decoder import DecoderShard
from nereus.model.group import Alone
from nereus.model.kv_cache import KvCache
from nereus.model.weights import CheckpointSource, load_shard
from nereus.runtime.generation import Request, Response, Sampling, generate

DEFAULT_MODEL = "models/smollm2-135m-instruct"
PROMPT_TOKENS = 32
NEW_TOKENS = 64
BATCHES = (1, 8, 32)
# Ratios to reach, by precision and batch size.
GOALS = {"float32": {1: 1.9, 8: 2.5, 32: 2.6}, "bfloat16": {1: 1.9, 8: 2.1, 32: 2.3}}


def build_ours(path: str, dtype: torch.dtype) -> DecoderShard:
    """Load the whole model as one rank's shard, ready to decode."""
    spec = read_spec(path)
    shard = DecoderShard(spec, Layout(), 0, group=Alone(), dtype=dtype, device="cpu")
    shard.requires_grad_(False)
    load_shard(shard, CheckpointSource(path, spec))
    shard.prepare_decode()
    return shard


def run_ours(shard: DecoderShard, prompts: torch.Tensor, temperature: float) -> list[Response]:
    """Generate as a worker does in a step, cache allocation included."""
    cache = KvCache(
        shard.spec,
        Layout(),
        0,
        num_slots=len(prompts),
        max_tokens=PROMPT_TOKENS + NEW_TOKENS,
        dtype=shard.head_weight.dtype,
        device="cpu",
    )
    requests = [Request(i, tuple(prompt)) for i, prompt in enumerate(prompts.tolist())]
    sampling = Sampling(0, 0, temperature, 1.0, NEW_TOKENS, eos_ids=())
    return generate(shard, requests, sampling, cache=cache, replica=Alone(), tp=Alone())  # type: ignore[arg-type]


def run_theirs(model: Any, prompts: torch.Tensor) -> torch.Tensor:
    """Return the greedy continuation [B, NEW_TOKENS] of transformers."""
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    with torch.inference_mode():
        out = model.generate(prompts, attention_mask=torch.ones_like(prompts), **options)
    return out[:, PROMPT_TOKENS:]


def median_seconds(runs: Sequence[Callable[[], Any]], repeats: int) -> list[float]:
    """Return the median time of each run, taking turns after one warm-up each."""
    for run in runs:
        run()
    seconds: list[list[float]] = [[] for _ in runs]
    for _ in range(repeats):
        for run, times in zip(runs, seconds, strict=True):
            start = time.perf_counter()
            run()
            times.append(time.perf_counter() - start)
    return [statistics.median(times) for times in seconds]


def measure(path: str, dtype_name: str, batches: Sequence[int], repeats: int) -> list[dict[str, Any]]:
    """Return one record a batch size: tokens/s of both sides and their ratio."""
    from transformers import AutoModelForCausalLM

    dtype = getattr(torch, dtype_name)
    shard = build_ours(path, dtype)
    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()
    generator = torch.Generator().manual_seed(0)
    records = []
    for batch in batches:
        prompts = torch.randint(3, shard.spec.vocab, (batch, PROMPT_TOKENS), generator=generator)
        ours = torch.tensor([response.tokens for response in run_ours(shard, prompts, 0.0)])
        same = (ours == run_theirs(model, prompts)).all(dim=1).double().mean().item()
        runs = [
            lambda p=prompts: run_ours(shard, p, 0.0),
            lambda p=prompts: run_theirs(model, p),
            lambda p=prompts: run_ours(shard, p, 1.0),
        ]
        speeds = [batch * NEW_TOKENS / seconds for seconds in median_seconds(runs, repeats)]
        records.append(
            {
                "dtype": dtype_name,
                "batch": batch,
                "nereus_tokens_per_s": speeds[0],
                "transformers_tokens_per_s": speeds[1],
                "ratio": speeds[0] / speeds[1],
                "goal": GOALS[dtype_name].get(batch),
                "share_of_equal_responses": same,
                "nereus_sampling_tokens_per_s": speeds[2],
            }
        )
        print(describe(records[-1]), flush=True)
    return records


def describe(record: dict[str, Any]) -> str:
    goal = f"{record['goal']:.1f}" if record["goal"] else "-"
    return (
        f"{record['dtype']:<9} {record['batch']:>5} {record['nereus_tokens_per_s']:>10.0f} "
        f"{record['transformers_tokens_per_s']:>13.0f} {record['ratio']:>6.2f} {goal:>5} "
        f"{record['share_of_equal_responses']:>11.0%} {record['nereus_sampling_tokens_per_s']:>16.0f}"
    )


def run(path: str, *, threads: int = 2, repeats: int = 5, batches: Sequence[int] = BATCHES) -> dict[str, Any]:
    """Measure every precision and batch size, print a table and return the record for JSON."""
    torch.set_num_threads(threads)
    print(f"decode tokens/s, {PROMPT_TOKENS} + {NEW_TOKENS} tokens, {threads} threads, {path}")
    print("precision batch     nereus  transformers  ratio  goal  equal greedy  nereus sampling")
    rows = [record for dtype in GOALS for record in measure(path, dtype, batches, repeats)]
    return {"benchmark": "decode", "model": path, "threads": threads, "torch": torch.__version__, "rows": rows}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--batches", type=int, nargs="+", default=list(BATCHES))
    parser.add_argument("--json", help="file to write the record to")
    options = parser.parse_args(arguments)
    record = run(options.model, threads=options.threads, repeats=options.repeats, batches=options.batches)
    if options.json:
        Path(options.json).write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
