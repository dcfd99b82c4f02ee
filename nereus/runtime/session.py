"""A running job: its workers, its plan and the rollouts of the step in flight. One method is one task of the flow.

generate -> score | infer_reference | infer_logprobs | infer_values -> estimate_advantages
         -> train_actor | train_critic -> sync_weights -> finish_step
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

from nereus.config import RunConfig
from nereus.data import PromptTokens
from nereus.model.export import abandon_export, begin_export, finish_export
from nereus.plan import Plan
from nereus.ppo.batching import order_of_minibatches, prompt_indices
from nereus.ppo.kl import KlController
from nereus.ppo.learning_rate import LearningRate
from nereus.rewards import RewardPool, RewardRequest
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.generation import Request, Sampling
from nereus.runtime.job import Job, prepare_job
from nereus.runtime.local import LocalEngine
from nereus.runtime.measure import collect_metrics
from nereus.runtime.rank import BuildOrder
from nereus.runtime.rollouts import Rollouts, estimate_advantages
from nereus.runtime.run_dir import RunDir
from nereus.runtime.samples import Sample
from nereus.runtime.shares import merge_inference, share_generation, share_inference, share_training, to_devices
from nereus.runtime.timing import StepClock
from nereus.runtime.training import LossSettings, OptimizerSettings, TrainingStats
from nereus.tracking import Trackers, open_trackers

_open_sessions: dict[str, Session] = {}
# Epochs count attempts to connect a set of communicators; a number never returns in this process.
_epochs = itertools.count()


def find_session(run_id: str) -> Session:
    """Return the session of a run that is open in this process."""
    return _open_sessions[run_id]


class Session:
    """Everything that a running job holds; a context manager, so that every way out frees the workers."""

    def __init__(self, job: Job, run_dir: RunDir, *, run_id: str, engine: Engine | None = None) -> None:
        config = job.config
        self.job = job
        self.config = config
        self.run_id = run_id
        self.run_dir = run_dir.url
        self.steps = range(config.steps)
        self.plan: Plan = job.plan
        self.policy_version = 0
        self.kl = KlController(
            coef=config.ppo.kl_coef,
            adaptive=config.ppo.kl_adaptive,
            kl_target=config.ppo.kl_target,
            kl_horizon=config.ppo.kl_horizon,
        )
        self._records = run_dir
        self._rollouts: Rollouts | None = None
        self._clock = StepClock()
        self._stats: dict[str, list[TrainingStats]] = {}
        self._step_policy_version = 0
        self._kl_coef = self.kl.coef  # of the step in flight; `kl` is already the next one's
        self._owns_engine = engine is None
        self._engine = engine or make_engine(config)
        self._reward_pool: RewardPool | None = None
        self._trackers: Trackers | None = None
        self._close_lock = threading.Lock()

    @classmethod
    def open(cls, config: RunConfig, *, run_id: str, engine: Engine | None = None) -> Self:
        """Check everything at the door, then start the workers, build all model-stages and load their weights.

        Args:
            engine: running workers to use; they outlive the session. Without it the session has workers of its own.

        Raises:
            ValueError: the config can't run; raised before any worker starts.
            CommandError: a worker failed.
        """
        if run_id in _open_sessions:
            raise ValueError(f"run_dir: run {run_id} is open in this process already; choose another directory.")
        job = prepare_job(config)
        run_dir = RunDir.create(config.run_dir or os.path.join("runs", run_id), config)
        with ExitStack() as undo:
            undo.callback(_forget, run_dir)  # nothing has happened in it yet: the mended config may use it
            session = cls(job, run_dir, run_id=run_id, engine=engine)
            undo.callback(session.close)
            session._start()
            undo.pop_all()
        _open_sessions[run_id] = session
        return session

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Free workers, reward processes and trackers; may be called twice."""
        if _open_sessions.get(self.run_id) is self:
            del _open_sessions[self.run_id]
        with self._close_lock, ExitStack() as stack:  # what one part raises keeps no other from being closed
            if self._trackers is not None:
                stack.callback(self._trackers.close)
            if self._reward_pool is not None:
                stack.callback(self._reward_pool.close)
            stack.callback(self._engine.close if self._owns_engine else self._release)

    def _release(self) -> None:
        if self._engine.broken is None:
            self._run("session", "release", {device: {} for device in self.plan.devices}, None)

    def _start(self) -> None:
        config = self.config
        if config.reward.function is not None:
            self._reward_pool = RewardPool(
                config.reward.function, num_workers=config.reward.workers, timeout_s=config.reward.timeout_s
            )
            self._reward_pool.__enter__()
        self._trackers = open_trackers(config.tracking, self.run_dir, config)
        if self._owns_engine:
            self._engine.start(self.plan.devices)
        epoch = next(_epochs)
        for name in self.plan:
            order = self._build_order(name, epoch)
            self._run(name, "build", {device: {"order": order} for device in self.plan[name].devices}, None)
        training, generation = self.plan["actor.training"], self.plan["actor.generation"]
        devices = sorted({*training.devices, *generation.devices})
        link = {"epoch": epoch, "training": training, "generation": generation}
        self._run("actor.generation", "connect_sync", dict.fromkeys(devices, link), None)
        self._sync(None)
        self._clock = StepClock()

    def _build_order(self, name: str, epoch: int) -> BuildOrder:
        config, ppo = self.config, self.config.ppo
        return BuildOrder(
            model_stage=name,
            plan=self.plan[name],
            epoch=epoch,
            source=self.job.sources[name],
            dtype=getattr(torch, config.precision),
            optimizer=OptimizerSettings(ppo.betas, ppo.eps, ppo.weight_decay, ppo.grad_clip),
            loss=LossSettings(ppo.clip, ppo.value_clip, config.rollout.temperature),
        )

    def _run(
        self, label: str, method: str, kwargs: Mapping[int, Mapping[str, Any]], step: int | None
    ) -> dict[int, Any]:
        return run_command(self._engine, method, kwargs, label=label, step=step)

    # Generation

    def begin_step(self, rollouts: Rollouts | None = None) -> None:
        """Start a step's statistics; with rollouts given, go on from these instead of drawing any."""
        self._stats = {}
        self._step_policy_version = self.policy_version
        self._rollouts = rollouts

    def generate(self, step: int) -> dict[str, Any]:
        """Draw the step's rollouts with the current policy version."""
        self.begin_step()
        rollout, name = self.config.rollout, "actor.generation"
        count = rollout.samples_per_step
        ids = list(range(step * count, (step + 1) * count))
        chosen = prompt_indices(self.config.seed, len(self.job.prompts), ids[0], count, rollout.samples_per_prompt)
        prompts = [self.job.prompts[index] for index in chosen]
        requests = [Request(i, tuple(p.token_ids)) for i, p in zip(ids, prompts, strict=True)]
        sampling = Sampling(
            seed=self.config.seed,
            step=step,
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            max_response_tokens=rollout.max_response_tokens,
            eos_ids=self.job.eos_ids,
        )
        plan = self.plan[name]
        work = share_generation(plan, requests, sampling, self.policy_version)
        with self._clock.span("generation"):
            results = self._run(name, "generate", {d: {"work": w} for d, w in to_devices(plan, work).items()}, step)
        responses = {r.sample_id: r for devices in plan.replicas for r in results[devices[0]]}
        self._rollouts = Rollouts(ids, prompts, [responses[i] for i in ids])
        return {"tokens": sum(self._rollouts.response_lengths)}

    # Inference

    def score(self, step: int) -> dict[str, Any]:
        """Score the responses with the reward function or the reward model."""
        with self._clock.span("inference"):
            scores = self._call_function() if self._reward_pool is not None else self._call_reward_model(step)
        self.rollouts.scores = torch.tensor(scores, dtype=torch.float64)
        return {"reward_mean": float(np.mean(scores))}

    def _call_function(self) -> list[float]:
        assert self._reward_pool is not None
        return self._reward_pool.score(
            [
                RewardRequest(response.sample_id, prompt.text, self._text(response.tokens), prompt.example)
                for prompt, response in zip(self.rollouts.prompts, self.rollouts.responses, strict=True)
            ]
        )

    def _text(self, tokens: list[int]) -> str:
        return self.job.tokenizer.decode(tokens, skip_special_tokens=True)

    def _call_reward_model(self, step: int) -> list[float]:
        rollouts, tokenizer = self.rollouts, self.job.reward_tokenizer
        if tokenizer is None:
            samples = [rollouts.sample(index) for index in range(len(rollouts))]
        else:
            samples = [
                retokenize(tokenizer, prompt, self._text(response.tokens))
                for prompt, response in zip(rollouts.prompts, rollouts.responses, strict=True)
            ]
            self._check_reward_lengths(samples)
        return [float(array[0]) for array in self._infer("reward.inference", "infer_scores", samples, step)]

    def _check_reward_lengths(self, samples: list[Sample]) -> None:
        longest = max(len(sample.tokens) for sample in samples)
        most = self.job.sources["reward.inference"].spec.max_positions
        if longest > most:
            raise RuntimeError(
                f"A response has {longest} tokens in the reward model's chat template, which takes {most}; "
                "lower rollout.max_response_tokens."
            )

    def infer_reference(self, step: int) -> dict[str, Any]:
        """Compute the reference's log-probs of the responses."""
        return self._infer_column("reference.inference", "infer_logprobs", "ref_logprobs", step)

    def infer_logprobs(self, step: int) -> dict[str, Any]:
        """Compute the trainer's own log-probs of the responses, before any update."""
        return self._infer_column("actor.training", "infer_logprobs", "old_logprobs", step)

    def infer_values(self, step: int) -> dict[str, Any]:
        """Compute the critic's values before each response token."""
        return self._infer_column("critic.training", "infer_values", "old_values", step)

    def _infer_column(self, name: str, method: str, column: str, step: int) -> dict[str, Any]:
        samples = [self.rollouts.sample(index) for index in range(len(self.rollouts))]
        extra = {"temperature": self.config.rollout.temperature} if method == "infer_logprobs" else {}
        with self._clock.span("inference"):
            self.rollouts.columns[column] = self._infer(name, method, samples, step, **extra)
        return {"tokens": sum(len(sample.tokens) for sample in samples)}

    def _infer(self, name: str, method: str, samples: list[Sample], step: int, **extra: Any) -> list[np.ndarray]:
        plan = self.plan[name]
        work, shares = share_inference(plan, samples)
        kwargs = {d: {"model_stage": name, "work": w, **extra} for d, w in to_devices(plan, work).items()}
        return merge_inference(plan, shares, self._run(name, method, kwargs, step))

    def estimate_advantages(self, step: int) -> dict[str, Any]:
        """Compute token rewards, advantages and returns of the step in the driver."""
        ppo = self.config.ppo
        with self._clock.span("inference"):
            mean_kl = estimate_advantages(
                self.rollouts,
                kl_coef=self.kl.coef,
                no_eos_penalty=ppo.no_eos_penalty,
                gamma=ppo.gamma,
                lam=ppo.lam,
            )
        self._kl_coef = self.kl.coef
        record = {"kl_coef": self._kl_coef, "sample_kl": mean_kl}
        self.kl = self.kl.updated(mean_kl, len(self.rollouts))
        return record

    # Training

    def train_actor(self, step: int) -> dict[str, Any]:
        """Run all updates of the actor."""
        return self._train("actor.training", ("old_logprobs", "advantages"), self.config.ppo.actor_lr, step)

    def train_critic(self, step: int) -> dict[str, Any]:
        """Run all updates of the critic."""
        return self._train("critic.training", ("old_values", "returns"), self.config.ppo.critic_lr, step)

    def _train(self, name: str, columns: tuple[str, ...], peak_lr: float, step: int) -> dict[str, Any]:
        ppo, plan = self.config.ppo, self.plan[name]
        minibatches = [
            minibatch
            for epoch in range(ppo.epochs)
            for minibatch in order_of_minibatches(self.config.seed, step, epoch, len(self.rollouts), ppo.minibatches)
        ]
        rate = LearningRate(peak_lr, ppo.lr_schedule, ppo.lr_warmup_updates, ppo.lr_decay_updates)
        work = share_training(plan, self.rollouts, columns, minibatches)
        kwargs = {d: {"model_stage": name, "work": w, "learning_rate": rate} for d, w in to_devices(plan, work).items()}
        with self._clock.span("training"):
            results = self._run(name, "train", kwargs, step)
        # The last stage's first tp rank has the sums; norms, losses and counts are the same on all ranks.
        stats = [results[devices[-plan.layout.tp]] for devices in plan.replicas]
        self._stats[name] = stats
        if name == "actor.training":
            self.policy_version = stats[0].updates
        return {"updates": stats[0].updates, "skipped": stats[0].skipped, "gradient_norms": stats[0].gradient_norms}

    # Weight sync and the step's end

    def sync_weights(self, step: int) -> dict[str, Any]:
        """Bring actor.generation to the actor's policy version."""
        with self._clock.span("weight_sync"):
            received = self._sync(step)
        return {"bytes": received, "policy_version": self.policy_version}

    def _sync(self, step: int | None) -> int:
        training, generation = self.plan["actor.training"], self.plan["actor.generation"]
        devices = sorted({*training.devices, *generation.devices})
        kwargs = {device: {"policy_version": self.policy_version} for device in devices}
        return sum(self._run("actor.generation", "sync_weights", kwargs, step).values())

    def finish_step(self, step: int) -> dict[str, Any]:
        """Write the step's line of metrics.jsonl and return it."""
        peaks = self._run("memory", "take_peak_memory", {device: {} for device in self.plan.devices}, step)
        metrics = collect_metrics(
            step=step,
            policy_version=self._step_policy_version,
            kl_coef=self._kl_coef,
            rollouts=self.rollouts,
            stats=self._stats,
            max_response_tokens=self.config.rollout.max_response_tokens,
            plan=self.plan,
            clock=self._clock,
            peaks=peaks,
        )
        self._records.append_metrics(metrics)
        if self._trackers is not None:
            self._trackers.log(step, metrics)
        self._rollouts = None
        self._clock = StepClock()  # what happens between two steps is the next one's time
        return metrics

    def finish(self) -> dict[str, Any]:
        """Write the actor to RUN_DIR/final as a Hugging Face checkpoint and return where it lies."""
        name, source = "actor.training", self.job.sources["actor.training"]
        export = begin_export(
            self._records.path("final"),
            source.spec,
            dtype=torch.float32 if self.config.precision == "bfloat16" else getattr(torch, self.config.precision),
            config_from=source.path,
            tokenizer_from=self.job.tokenizer_path,
            replace=True,
        )
        kwargs = {device: {"model_stage": name, "plan": export} for device in self.plan[name].devices}
        try:
            written = sum(self._run(name, "write_export", kwargs, None).values())
            finish_export(export, written_bytes=written)
        except BaseException:
            abandon_export(export)
            raise
        return {"run_dir": self.run_dir, "final": self._records.path("final"), "bytes": written}

    def worker_pids(self) -> dict[int, int]:
        """Return the process of each device's worker."""
        return self._engine.pids()

    @property
    def rollouts(self) -> Rollouts:
        """The rollouts of the step in flight."""
        if self._rollouts is None:
            raise RuntimeError("no rollouts: `generate` opens a step.")
        return self._rollouts


def make_engine(config: RunConfig) -> Engine:
    """Return the engine that a config asks for, without workers yet."""
    return LocalEngine(
        "nereus.runtime.rank:Rank",
        device=config.cluster.device,
        threads_per_device=config.cluster.threads_per_device,
        memory_per_device_bytes=config.cluster.memory_per_device,
    )


def _forget(run_dir: RunDir) -> None:
    with suppress(Exception):  # a store that is gone must not hide why the start failed
        run_dir.forget()


def retokenize(tokenizer: Any, prompt: PromptTokens, response: str) -> Sample:
    """Return a prompt and response as another tokenizer's chat: what a reward model with its own tokens takes."""
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt.text + response)
    else:
        messages = [*prompt.messages, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    return Sample(np.asarray(tokens, dtype=np.int64), len(tokens) - 1)
