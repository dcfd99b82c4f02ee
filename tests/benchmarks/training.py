"""Floating point rate of a training step against that of bare matrix products at the model's shapes, in one run.

Run `python -m tests.benchmarks.training [--model DIR] [--quick] [--json FILE]`. One worker trains `actor.training` on
8 samples of 32 + 64 tokens; in turn with it the same worker times the step's products alone: with torch.mm, with the
product that Nereus uses, and (without the weights' gradients) on oneDNN's packed weights.

Counted are the operations that the step needs: 6 * elements * tokens of each matrix (the head at response positions
only) and 12 * heads * head_dim for each pair of tokens that attend. Norms, rotary angles, the loss, the gradient's norm
and the optimizer take time and count nothing.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np

from nereus.model.spec import ModelSpec
from nereus.ppo.learning_rate import LearningRate
from nereus.runtime.samples import Minibatch, Sample
from nereus.runtime.training import TrainingWork
from tests.benchmarks.bench_job import Workers, open_workers, pin_to_cores
from tests.benchmarks.report import DEFAULT_MODEL, OUT_DIR, describe_run, print_table, require_model, write_record

STAGE = "actor.training"
PROMPT_TOKENS, RESPONSE_TOKENS = 32, 64
PRODUCTS = ("torch.mm", "nereus", "packed")
# The step's rate as a multiple of torch.mm's.
GOALS = {"float32": 1.5, "bfloat16": None}


def make_work(spec: ModelSpec, num_samples: int) -> TrainingWork:
    """Return one update on random samples in one micro-batch."""
    generator = np.random.default_rng(0)
    samples = tuple(
        Sample(
            tokens=generator.integers(0, spec.vocab, PROMPT_TOKENS + RESPONSE_TOKENS),
            prompt_tokens=PROMPT_TOKENS,
            columns={
                "old_logprobs": generator.normal(-10.0, 0.1, RESPONSE_TOKENS),
                "advantages": generator.normal(0.0, 1.0, RESPONSE_TOKENS),
            },
        )
        for _ in range(num_samples)
    )
    minibatch = Minibatch((tuple(range(num_samples)),), num_samples * RESPONSE_TOKENS)
    return TrainingWork(samples, (minibatch,), recompute=False)


def attention_flops(spec: ModelSpec, lengths: Sequence[int]) -> float:
    """Return the operations of attention, forward and backward: each token attends to itself and those before it."""
    pairs = sum(length * (length + 1) // 2 for length in lengths)
    return 12.0 * spec.layers * spec.heads * spec.head_dim * pairs


def measure(model: str, precision: str, *, threads: int, num_samples: int, repeats: int) -> dict[str, Any]:
    """Return the record of one precision: seconds and GFLOP/s of the step and of its products."""
    tree: dict[str, Any] = {
        "precision": precision,
        "rollout": {"prompts_per_step": num_samples, "max_response_tokens": RESPONSE_TOKENS},
        "ppo": {"minibatches": 1},
    }
    with open_workers(model, devices=1, threads=threads, gib=14, **tree) as workers:
        workers.build([STAGE])
        spec = workers.job.sources[STAGE].spec
        work = make_work(spec, num_samples)
        lengths = [PROMPT_TOKENS + RESPONSE_TOKENS - 1] * num_samples
        matrices = workers.run(
            "list_matrices",
            {0: {"model_stage": STAGE, "tokens": sum(lengths), "response_tokens": num_samples * RESPONSE_TOKENS}},
        )[0]
        flops = sum(3 * m.flops * m.count for m in matrices) + attention_flops(spec, lengths)
        steps, rates = take_turns(workers, precision, work, matrices, repeats)
    total = statistics.median(step["total"] for step in steps)
    step_rate = flops / total / 1e9
    return {
        "precision": precision,
        "samples": num_samples,
        "step_s": total,
        "forward_backward_s": statistics.median(step["forward_backward"] for step in steps),
        "step_flops": flops,
        "step_gflops": step_rate,
        "products_gflops": rates,
        "ratio_to_torch_mm": step_rate / rates["torch.mm"],
        "goal": GOALS[precision],
        "matrices": [asdict(matrix) for matrix in matrices],
    }


def take_turns(
    workers: Workers, precision: str, work: TrainingWork, matrices: Sequence[Any], repeats: int
) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Return the steps' seconds and the products' median GFLOP/s; the first step warms up and doesn't count."""
    train = {0: {"model_stage": STAGE, "work": work, "learning_rate": LearningRate(1e-6, "constant", 0, 1000)}}
    workers.run("time_training", train)
    steps: list[dict[str, float]] = []
    rates: dict[str, list[float]] = {kind: [] for kind in PRODUCTS}
    for _ in range(repeats):
        steps.append(workers.run("time_training", train)[0])
        for kind in PRODUCTS:
            done = workers.run("time_products", {0: {"kind": kind, "dtype": precision, "matrices": matrices}})[0]
            rates[kind].append(done["flops"] / done["seconds"] / 1e9)
    return steps, {kind: statistics.median(values) for kind, values in rates.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="directory of a Hugging Face checkpoint")
    parser.add_argument("--precisions", nargs="+", choices=list(GOALS), default=list(GOALS))
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--quick", action="store_true", help="two samples, once")
    parser.add_argument("--json", default=str(OUT_DIR / "training.json"), help="file to write the record to")
    options = parser.parse_args(arguments)
    require_model(options.model)
    pin_to_cores(options.threads)
    head = describe_run("training", threads=options.threads)
    samples, repeats = (2, 1) if options.quick else (8, options.repeats)
    rows = [
        measure(options.model, precision, threads=options.threads, num_samples=samples, repeats=repeats)
        for precision in options.precisions
    ]
    write_record({**head, "model": options.model, "rows": rows}, options.json)
    columns = ["precision", "step s", "fwd+bwd s", "step", *PRODUCTS, "step / torch.mm", "goal"]
    lines = [
        [
            row["precision"],
            row["step_s"],
            row["forward_backward_s"],
            row["step_gflops"],
            *(row["products_gflops"][kind] for kind in PRODUCTS),
            row["ratio_to_torch_mm"],
            row["goal"],
        ]
        for row in rows
    ]
    print_table(f"GFLOP/s of a training step and of its products, {options.threads} threads", columns, lines)


if __name__ == "__main__":
    main()
