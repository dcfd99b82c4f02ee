"""One PPO step written out plainly: one sample at a time, `transformers` models, torch's own AdamW, all in float64.

It shares nothing with the program but the order of the minibatches, which is a drawn number and no formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from nereus.ppo.batching import order_of_minibatches


@dataclass
class PlainSample:
    """A prompt, its response, its score, and whether an EOS ended it."""

    prompt: list[int]
    response: list[int]
    score: float
    ended: bool


@dataclass
class PlainStep:
    """What the step leaves, by the names of the metrics."""

    actor: dict[str, Tensor]
    critic: dict[str, Tensor]
    metrics: dict[str, Any]
    columns: dict[str, list[Tensor]] = field(default_factory=dict)


class Rotary(nn.Module):
    """Angles in float64; the library's are float32 whatever the model's dtype."""

    def __init__(self, theta: float, head_dim: int) -> None:
        super().__init__()
        self.frequencies = theta ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        angles = position_ids[..., None].double() * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos(), angles.sin()


def load_llama(folder: Path) -> nn.Module:
    """Return a Llama that computes in float64 throughout: the library's norms and angles round to float32."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder, dtype=torch.float64, attn_implementation="sdpa")
    config = model.config
    model.model.rotary_emb = Rotary(config.rope_parameters["rope_theta"], config.head_dim)

    def norm(old: nn.Module) -> nn.RMSNorm:
        new = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps, dtype=torch.float64)
        new.weight = old.weight
        return new

    model.model.norm = norm(model.model.norm)
    for layer in model.model.layers:
        layer.input_layernorm = norm(layer.input_layernorm)
        layer.post_attention_layernorm = norm(layer.post_attention_layernorm)
    return model


def logprobs_and_entropy(model: nn.Module, sample: PlainSample, temperature: float) -> tuple[Tensor, Tensor]:
    """Return [R] log-probs of the response's tokens and [R] entropies, of the full softmax at the temperature."""
    logits = model(torch.tensor([sample.prompt + sample.response])).logits[0]
    start, count = len(sample.prompt) - 1, len(sample.response)
    logprobs = torch.log_softmax(logits[start : start + count] / temperature, dim=-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs[torch.arange(count), torch.tensor(sample.response)], entropy


def values_of(model: nn.Module, head: Tensor, sample: PlainSample) -> Tensor:
    """Return [R] values: the one at index t sees the prompt and t response tokens."""
    hidden = model.model(torch.tensor([sample.prompt + sample.response])).last_hidden_state[0]
    start = len(sample.prompt) - 1
    return hidden[start : start + len(sample.response)] @ head[0]


def gae(rewards: Tensor, values: Tensor, gamma: float, lam: float) -> Tensor:
    """Return [R] advantages as the double sum of the definition, without a recursion."""
    count = len(rewards)
    next_values = torch.cat((values[1:], torch.zeros(1, dtype=torch.float64)))
    deltas = rewards + gamma * next_values - values
    return torch.stack([sum((gamma * lam) ** (k - t) * deltas[k] for k in range(t, count)) for t in range(count)])


def make_optimizer(parameters: Sequence[nn.Parameter], ppo: Any) -> torch.optim.AdamW:
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": ppo.weight_decay},
        {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=ppo.betas, eps=ppo.eps)


def update(optimizer: torch.optim.AdamW, loss: Tensor, ppo: Any, lr: float) -> float:
    """Apply one clipped update and return the gradient's norm before clipping."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.zero_grad()
    loss.backward()
    norm = nn.utils.clip_grad_norm_(parameters, ppo.grad_clip)
    for group in optimizer.param_groups:
        group["lr"] = lr
    optimizer.step()
    return float(norm)


def run_plain_step(
    samples: Sequence[PlainSample], actor: nn.Module, reference: nn.Module, critic: nn.Module, head: Tensor, config: Any
) -> PlainStep:
    """Train actor and critic in place on one step's rollouts.

    Args:
        head: [1, hidden] float64, the critic's value head.
        config: a RunConfig, for its numbers; the learning rate is a linear warm-up and constant after.
    """
    ppo, temperature = config.ppo, config.rollout.temperature
    columns: dict[str, list[Tensor]] = {"old_logprobs": [], "ref_logprobs": [], "old_values": []}
    with torch.no_grad():
        for sample in samples:
            columns["old_logprobs"].append(logprobs_and_entropy(actor, sample, temperature)[0])
            columns["ref_logprobs"].append(logprobs_and_entropy(reference, sample, temperature)[0])
            columns["old_values"].append(values_of(critic, head, sample))
    add_advantages(samples, columns, ppo)

    head_parameter = nn.Parameter(head.clone())
    actor_parameters = [p for p in actor.parameters() if p.requires_grad]
    actor_optimizer = make_optimizer(actor_parameters, ppo)
    critic_optimizer = make_optimizer([*critic.model.parameters(), head_parameter], ppo)
    sums = dict.fromkeys(("tokens", "policy_loss", "value_loss", "clipped", "ratio", "entropy"), 0.0)
    norms: dict[str, list[float]] = {"actor": [], "critic": []}
    updates = 0
    for epoch in range(ppo.epochs):
        for minibatch in order_of_minibatches(config.seed, 0, epoch, len(samples), ppo.minibatches):
            warm = min(1.0, (updates + 1) / ppo.lr_warmup_updates)
            tokens = sum(len(samples[i].response) for i in minibatch)
            policy_loss = policy_loss_of(actor, [samples[i] for i in minibatch], pick(columns, minibatch), config, sums)
            norms["actor"].append(update(actor_optimizer, policy_loss / tokens, ppo, warm * ppo.actor_lr))
            value_loss = torch.zeros((), dtype=torch.float64)
            for i in minibatch:
                values = values_of(critic, head_parameter, samples[i])
                value_loss = value_loss + value_loss_of(
                    values, columns["old_values"][i], columns["returns"][i], ppo.value_clip
                )
            norms["critic"].append(update(critic_optimizer, value_loss / tokens, ppo, warm * ppo.critic_lr))
            sums["policy_loss"] += float(policy_loss.detach())
            sums["value_loss"] += float(value_loss.detach())
            sums["tokens"] += tokens
            updates += 1
    critic_tensors = {f"model.{name}": p.detach() for name, p in critic.model.named_parameters()}
    return PlainStep(
        actor={name: p.detach() for name, p in actor.named_parameters()},
        critic={**critic_tensors, "value_head.weight": head_parameter.detach()},
        metrics=metrics_of(samples, columns, sums, norms),
        columns=columns,
    )


def pick(columns: Mapping[str, list[Tensor]], indices: Sequence[int]) -> dict[str, list[Tensor]]:
    return {name: [column[i] for i in indices] for name, column in columns.items()}


def add_advantages(samples: Sequence[PlainSample], columns: dict[str, list[Tensor]], ppo: Any) -> None:
    """Add "advantages" (whitened over the step's response tokens) and "returns"."""
    raw, returns = [], []
    for i, sample in enumerate(samples):
        rewards = -ppo.kl_coef * (columns["old_logprobs"][i] - columns["ref_logprobs"][i])
        rewards[-1] += sample.score - (0.0 if sample.ended else ppo.no_eos_penalty)
        advantages = gae(rewards, columns["old_values"][i], ppo.gamma, ppo.lam)
        raw.append(advantages)
        returns.append(advantages + columns["old_values"][i])
    everything = torch.cat(raw)
    mean = everything.sum() / len(everything)
    variance = ((everything - mean) ** 2).sum() / len(everything)
    columns["advantages"] = [(advantages - mean) / math.sqrt(variance + 1e-8) for advantages in raw]
    columns["returns"] = returns


def policy_loss_of(
    actor: nn.Module,
    samples: Sequence[PlainSample],
    columns: Mapping[str, list[Tensor]],
    config: Any,
    sums: dict[str, float],
) -> Tensor:
    """Return the sum over a minibatch's tokens of the clipped surrogate, token by token."""
    clip, total = config.ppo.clip, torch.zeros((), dtype=torch.float64)
    for i, sample in enumerate(samples):
        logprobs, entropy = logprobs_and_entropy(actor, sample, config.rollout.temperature)
        sums["entropy"] += float(entropy.sum().detach())
        for t in range(len(sample.response)):
            ratio = torch.exp(logprobs[t] - columns["old_logprobs"][i][t])
            advantage = columns["advantages"][i][t]
            plain, clipped = advantage * ratio, advantage * torch.clamp(ratio, 1 - clip, 1 + clip)
            total = total - torch.minimum(plain, clipped)
            sums["ratio"] += float(ratio.detach())
            sums["clipped"] += float(clipped < plain)
    return total


def value_loss_of(values: Tensor, old_values: Tensor, returns: Tensor, value_clip: float) -> Tensor:
    """Return the sum over one response of half the larger squared error, plain or clipped."""
    total = torch.zeros((), dtype=torch.float64)
    for value, old, target in zip(values, old_values, returns, strict=True):
        near = old + torch.clamp(value - old, -value_clip, value_clip)
        total = total + 0.5 * torch.maximum((value - target) ** 2, (near - target) ** 2)
    return total


def metrics_of(
    samples: Sequence[PlainSample],
    columns: Mapping[str, list[Tensor]],
    sums: Mapping[str, float],
    norms: dict[str, list[float]],
) -> dict[str, Any]:
    """Return the metrics; means are over response tokens, those of rewards over samples."""
    scores = torch.tensor([sample.score for sample in samples], dtype=torch.float64)
    k1 = torch.cat(columns["old_logprobs"]) - torch.cat(columns["ref_logprobs"])
    returns, values = torch.cat(columns["returns"]), torch.cat(columns["old_values"])
    errors = returns - values
    unexplained = ((errors - errors.mean()) ** 2).mean() / ((returns - returns.mean()) ** 2).mean()
    return {
        "reward_mean": float(scores.mean()),
        "reward_std": float(((scores - scores.mean()) ** 2).mean().sqrt()),
        "kl_k1": float(k1.mean()),
        "kl_k3": float((torch.exp(-k1) - 1 + k1).mean()),
        "entropy": sums["entropy"] / sums["tokens"],
        "clip_fraction": sums["clipped"] / sums["tokens"],
        "ratio_mean": sums["ratio"] / sums["tokens"],
        "policy_loss": sums["policy_loss"] / sums["tokens"],
        "value_loss": sums["value_loss"] / sums["tokens"],
        "explained_variance": float(1 - unexplained),
        "gradient_norm.actor": norms["actor"],
        "gradient_norm.critic": norms["critic"],
    }
