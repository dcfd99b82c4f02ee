"""The steps of PPO on running workers: one method is one task of the flow; the rollouts of a step live here.

generate -> score | infer_reference | infer_logprobs | infer_values -> estimate_advantages
         -> train_actor | train_critic -> sync_weights
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch

from nereus.data import PromptTokens
from nereus.plan import Plan
from nereus.ppo.batching import order_of_minibatches, prompt_indices
from nereus.ppo.kl import KlController
from nereus.ppo.learning_rate import LearningRate
from nereus.rewards import RewardPool, RewardRequest
from nereus.runtime.engine import Engine, run_command
from nereus.runtime.generation import Request, Sampling
from nereus.runtime.job import Job
from nereus.runtime.rank_state import Counters
from nereus.runtime.rollouts import Rollouts, estimate_advantages
from nereus.runtime.samples import Sample
from nereus.runtime.shares import merge_inference, share_generation, share_inference, share_training, to_devices
from nereus.runtime.timing import StepClock
from nereus.runtime.training import TrainingStats
from nereus.staged_state import STAGED


class PpoSteps:
    """The algorithm: what a run knows between its steps, and the stages of the step in flight."""

    def __init__(self, job: Job, engine: Engine) -> None:
        self.job = job
        self.config = job.config
        self.plan: Plan = job.plan
        self._begin_anew()
        self._engine = engine
        self._reward_pool: RewardPool | None = None
        self._rollouts: Rollouts | None = None
        self._clock = StepClock()
        self._stats: dict[str, list[TrainingStats]] = {}
        self._step_policy_version = 0
        self._kl_coef = self.kl.coef  # of the step in flight; `kl` is already the next one's

    def _begin_anew(self) -> None:
        """Count from 0, as before the first step."""
        ppo = self.config.ppo
        self.policy_version = 0
        self.kl = KlController(
            coef=ppo.kl_coef, adaptive=ppo.kl_adaptive, kl_target=ppo.kl_target, kl_horizon=ppo.kl_horizon
        )
        self.counters = dict.fromkeys(STAGED, Counters())

    def _run(
        self, label: str, method: str, kwargs: Mapping[int, Mapping[str, Any]], step: int | None
    ) -> dict[int, Any]:
        note = None if step is None else partial(self._clock.times.note, label, method)
        return run_command(self._engine, method, kwargs, label=label, step=step, on_times=note)

    def _before_update(self, model_stage: str) -> None:
        """Called right before the first update of a step changes the tensors of a model-stage."""

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
        self._clock.times.note_tokens(f"{name}/inference", to_devices(plan, [part.num_tokens for part in work]))
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
        self._clock.times.note_tokens(f"{name}/training", to_devices(plan, [part.num_tokens for part in work]))
        kwargs = {d: {"model_stage": name, "work": w, "learning_rate": rate} for d, w in to_devices(plan, work).items()}
        self._before_update(name)
        with self._clock.span("training"):
            results = self._run(name, "train", kwargs, step)
        # The last stage's first tp rank has the sums; norms, losses and counts are the same on all ranks.
        stats = [results[devices[-plan.layout.tp]] for devices in plan.replicas]
        self._stats[name] = stats
        self.counters[name] = Counters(stats[0].updates, stats[0].skipped_in_a_row)
        if name == "actor.training":
            self.policy_version = stats[0].updates
        return {"updates": stats[0].updates, "skipped": stats[0].skipped, "gradient_norms": stats[0].gradient_norms}

    # Weight sync

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

    @property
    def rollouts(self) -> Rollouts:
        """The rollouts of the step in flight."""
        if self._rollouts is None:
            raise RuntimeError("no rollouts: `generate` opens a step.")
        return self._rollouts


def retokenize(tokenizer: Any, prompt: PromptTokens, response: str) -> Sample:
    """Return a prompt and response as another tokenizer's chat: what a reward model with its own tokens takes."""
    if tokenizer.chat_template is None:
        tokens = tokenizer.encode(prompt.text + response)
    else:
        messages = [*prompt.messages, {"role": "assistant", "content": response}]
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        tokens = tokenizer.encode(text, add_special_tokens=False)
    return Sample(np.asarray(tokens, dtype=np.int64), len(tokens) - 1)
