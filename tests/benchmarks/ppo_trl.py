"""TRL's side of the PPO benchmark: `python -P ppo_trl.py SPEC.json OUT.json`, in an interpreter that has TRL.

Needs nothing of Nereus. TRL's loop is one method, so its stages are told apart from outside: by wrapping the function
that generates, the first forward pass of the trained model in a step, and the scheduler's step at the end of training.
Its calls of the garbage collector are timed too and belong to no stage.
"""

from __future__ import annotations

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

STAGES = ("generation", "inference", "training")


def read_clocks() -> tuple[float, float]:
    """Return the wall's seconds and the processor time of this process."""
    return time.perf_counter(), time.process_time()


class Stopwatch:
    """Clocks of one run: per step when generation began and each stage ended, and how long collections took between."""

    def __init__(self) -> None:
        self.steps: list[dict[str, tuple[float, float]]] = []
        self.finished = (0.0, 0.0)

    def mark(self, name: str) -> None:
        """Note the first time that `name` happens in the step."""
        self.steps[-1].setdefault(name, read_clocks())

    def around_generation(self, generate: Callable[..., Any], response_tokens: int) -> Callable[..., Any]:
        def timed(model: Any, queries: Any, *rest: Any) -> Any:
            self.steps.append({})
            self.mark("start")
            tokens, logits = generate(model, queries, *rest)
            self.mark("generation")
            assert tokens.shape[1] == queries.shape[1] + response_tokens, tokens.shape
            return tokens, logits

        return timed

    def before_training(self, *_: Any, **__: Any) -> None:
        self.mark("inference")

    def around_scheduler(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            self.mark("training")
            return step(*arguments, **options)

        return timed

    def collect(self) -> int:
        """Stand in for `gc.collect`."""
        begun = read_clocks()
        found = gc.collect()
        if self.steps and "inference" not in self.steps[-1]:
            wall, processor = read_clocks()
            self.steps[-1]["collection"] = (wall - begun[0], processor - begun[1])
        return found

    def seconds(self, clock: int) -> list[dict[str, float]]:
        """Return the steps' seconds by stage; "other" is what no stage accounts for, collections included.

        Args:
            clock: 0 for the wall's, 1 for processor time.
        """
        ends = [step["start"] for step in self.steps[1:]] + [self.finished]
        result = []
        for step, end in zip(self.steps, ends, strict=True):
            at = {name: clocks[clock] for name, clocks in step.items()}
            stages = {
                "generation": at["generation"] - at["start"],
                "inference": at["inference"] - at["generation"] - at.get("collection", 0.0),
                "training": at["training"] - at["inference"],
            }
            total = end[clock] - at["start"]
            result.append({**stages, "other": total - sum(stages.values()), "total": total})
        return result


def main(spec_path: str, out_path: str) -> None:
    spec = json.loads(Path(spec_path).read_text())
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[: spec["threads"]])
    with tempfile.TemporaryDirectory() as folder:
        watch = run(spec, folder)
    now_s = time.time() - watch.finished[0]
    records = [
        {
            "ended_unix_s": now_s + step["training"][0],
            "seconds": wall,
            "cpu_seconds": processor,
            "peak_memory_bytes": _peak_bytes(),
        }
        for step, wall, processor in zip(watch.steps, watch.seconds(0), watch.seconds(1), strict=True)
    ]
    Path(out_path).write_text(json.dumps({"steps": records[spec["warm_up"] :]}))


def run(spec: dict[str, Any], folder: str) -> Stopwatch:
    """Run TRL's trainer and return the clocks of its steps, warm-up included."""
    import torch
    from trl.experimental.ppo import ppo_trainer

    torch.set_num_threads(spec["threads"])
    watch = Stopwatch()
    ppo_trainer.batch_generation = watch.around_generation(
        ppo_trainer.batch_generation, spec["work"]["response_tokens"]
    )
    ppo_trainer.gc = SimpleNamespace(collect=watch.collect)
    trainer = make_trainer(spec, folder)
    trainer.model.register_forward_pre_hook(watch.before_training)
    trainer.lr_scheduler.step = watch.around_scheduler(trainer.lr_scheduler.step)
    trainer.train()
    watch.finished = read_clocks()
    return watch


def make_trainer(spec: dict[str, Any], folder: str) -> Any:
    """Return a trainer with the work's batch: one micro-batch a minibatch, no gradient checkpointing."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoTokenizer
    from trl.experimental.ppo import PPOConfig, PPOTrainer

    work = spec["work"]
    dtype = getattr(torch, work["precision"])
    lines = [json.loads(line) for line in Path(spec["prompts"]).read_text().splitlines()]
    data = Dataset.from_list([{"input_ids": line["token_ids"]} for line in lines])
    arguments = PPOConfig(
        output_dir=folder,
        use_cpu=True,
        bf16=False,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        gradient_checkpointing=False,
        per_device_train_batch_size=work["prompts"],
        gradient_accumulation_steps=1,
        num_mini_batches=work["minibatches"],
        num_ppo_epochs=1,
        total_episodes=work["prompts"] * (spec["warm_up"] + work["steps"]),
        local_rollout_forward_batch_size=work["prompts"],
        response_length=work["response_tokens"],
        temperature=1.0,
        num_sample_generations=0,
        learning_rate=1e-6,
    )

    def classifier() -> Any:
        return AutoModelForSequenceClassification.from_pretrained(spec["reward"], num_labels=1, dtype=dtype)

    return PPOTrainer(
        args=arguments,
        processing_class=AutoTokenizer.from_pretrained(spec["model"], padding_side="left"),
        model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype),
        ref_model=AutoModelForCausalLM.from_pretrained(spec["model"], dtype=dtype),
        reward_model=classifier(),
        value_model=classifier(),
        train_dataset=data,
        eval_dataset=data,
    )


def _peak_bytes() -> int:
    status = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM"))


if __name__ == "__main__":
    main(*sys.argv[1:])
