"""At the door: everything that can be wrong with a config is found here, before any worker starts."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from fsspec.implementations.memory import MemoryFileSystem

from nereus.cluster import local_cluster
from nereus.config import DeviceTrace, OptionalModelConfig, RunConfig, TinyConfig, resolve_path
from nereus.cost.memory import Workload
from nereus.data import PromptTokens, encode_prompts, read_prompts
from nereus.limits import REMOTE_STAGING_BUFFER_BYTES, STAGING_BUFFER_BYTES
from nereus.model.checkpoint import check_checkpoint, has_value_head, read_spec
from nereus.model.spec import Head, ModelSpec
from nereus.model.tokens import fetch_tokenizer, read_eos_ids
from nereus.plan import Plan
from nereus.rewards import load_reward_function
from nereus.runtime.frame import Frame
from nereus.runtime.run_dir import RunDir
from nereus.runtime.schedule import Schedule, plan_at, resolve_schedule
from nereus.runtime.sources import ModelSource
from nereus.trace_files import read_device_trace
from nereus.tracking import check_trackers
from nereus.transition.memory import TransitionMemory
from storage.errors import refuse_credentials
from storage.urls import local_path, open_filesystem
from storage.writable import check_writable


@dataclass(frozen=True)
class Job:
    """A checked config with all that it names: models, plans, prompts and tokenizers.

    Attributes:
        plan: with which the session begins: at step 0, or at the step that a resumed run goes on from.
        schedule: all plans of the run with the step from which each holds, the first from step 0 on; at least one.
        transition_memory: what a move from one of them to another may use.
    """

    config: RunConfig
    sources: Mapping[str, ModelSource]
    plan: Plan
    schedule: Schedule
    transition_memory: TransitionMemory
    prompts: list[PromptTokens]
    tokenizer: Any
    tokenizer_path: str
    reward_tokenizer: Any | None  # None: there is no reward model, or it takes the actor's tokens
    eos_ids: tuple[int, ...]
    workload: Workload
    capacities: Mapping[int, int]  # bytes of memory by device id
    device_trace: DeviceTrace  # empty: all devices are there, always
    frame: Frame  # what its control is made of

    @property
    def specs(self) -> dict[str, ModelSpec]:
        return {name: source.spec for name, source in self.sources.items()}

    def plan_at(self, step: int) -> Plan:
        """Return the plan that holds from the start of a step."""
        return plan_at(self.schedule, step)

    def begin_at(self, step: int) -> Job:
        """Return the job of a session that goes on at a step."""
        return replace(self, plan=self.plan_at(step))


def check_job(config: RunConfig) -> None:
    """Raise as `prepare_job` does, and for a run directory in use; silent otherwise, for the run itself warns."""
    if config.run_dir is not None:
        check_writable(config.run_dir)
        RunDir(config.run_dir).check_free()
    if config.staging.root is not None:
        check_writable(config.staging.root, field="staging.root")
    before = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        prepare_job(config)
    finally:
        logging.disable(before)


def prepare_job(config: RunConfig, *, first_step: int = 0) -> Job:
    """Check a config against the world and return the job.

    Args:
        first_step: at which it begins or goes on; plans that held only before it needn't fit any more.

    Raises:
        ValueError: something that the config names is missing, broken or doesn't fit; one sentence with the mend.
    """
    _check_devices(config)
    _check_places(config)
    check_trackers(config.tracking)
    device_trace = read_device_trace(config.drift.devices, num_steps=config.steps, num_devices=config.cluster.devices)
    sources = _sources(config)
    actor = sources["actor.training"]
    reward = sources.get("reward.inference")
    tokenizer_path = _tokenizer_path(config)
    tokenizer = _load_tokenizer(tokenizer_path, "model")
    if len(tokenizer) > actor.spec.vocab:
        raise ValueError(
            f"model has a vocabulary of {actor.spec.vocab} tokens, but its tokenizer {tokenizer_path} has "
            f"{len(tokenizer)}; use the tokenizer that belongs to the model."
        )
    _check_lengths(config, sources)
    prompts = encode_prompts(
        read_prompts(resolve_path(config.data.prompts)), tokenizer, config.rollout.max_prompt_tokens
    )
    if config.reward.function is not None:
        load_reward_function(config.reward.function)
    workload = Workload(
        samples_per_step=config.rollout.samples_per_step,
        minibatches=config.ppo.minibatches,
        prompt_tokens=config.rollout.max_prompt_tokens,
        response_tokens=config.rollout.max_response_tokens,
        staging_buffer_bytes=REMOTE_STAGING_BUFFER_BYTES if _stages_remotely(config) else STAGING_BUFFER_BYTES,
    )
    capacities = _capacities(config)
    specs = {name: source.spec for name, source in sources.items()}
    memory = TransitionMemory.of(specs, workload, config.precision, capacities)
    frame = Frame.of(config, specs, prompts, capacities, staging_buffer_bytes=workload.staging_buffer_bytes)
    schedule = resolve_schedule(config, memory, capacities, frame, first_step=first_step)
    return Job(
        config=config,
        sources=sources,
        plan=plan_at(schedule, first_step),
        schedule=schedule,
        transition_memory=memory,
        prompts=prompts,
        tokenizer=tokenizer,
        tokenizer_path=tokenizer_path,
        reward_tokenizer=_reward_tokenizer(config, tokenizer, actor.spec, reward.spec if reward else None),
        eos_ids=_eos_ids(config, tokenizer),
        workload=workload,
        capacities=capacities,
        device_trace=device_trace,
        frame=frame,
    )


def _sources(config: RunConfig) -> dict[str, ModelSource]:
    """Return per model-stage where its weights come from, in the order of the plan."""
    actor = _source(config, "actor", "lm", config.model)
    critic = _source(config, "critic", "value", config.critic)
    sources = {"actor.generation": actor, "actor.training": actor, "critic.training": critic}
    sources["reference.inference"] = _source(config, "reference", "lm", config.reference)
    if config.reward.model is not None:
        model = OptionalModelConfig(path=config.reward.model)
        sources["reward.inference"] = _source(config, "reward", "score", model)
    vocab = actor.spec.vocab
    for role, source in (("critic", critic), ("reference", sources["reference.inference"])):
        if source.spec.vocab != vocab:
            raise ValueError(
                f"{role} has a vocabulary of {source.spec.vocab} tokens and the actor one of {vocab}; "
                f"choose a {role} with the actor's tokenizer."
            )
    return sources


def _source(config: RunConfig, role: str, head: Head, model: OptionalModelConfig) -> ModelSource:
    weights_role = role
    if model.path is None and model.tiny is None:  # the actor's weights
        model, weights_role = config.model, "actor"
    if model.path is not None:
        path = os.path.expanduser(resolve_path(model.path))
        spec = read_spec(path, head=head)
        if head == "score" and spec.num_labels != 1:
            raise ValueError(f"reward.model: {path} has {spec.num_labels} labels; a reward model has exactly one.")
        lacks_head = head == "value" and not has_value_head(path)
        check_checkpoint(path, replace(spec, head="lm", tie_embeddings=True) if lacks_head else spec)
        return ModelSource(spec, path, config.seed, role, weights_role)
    assert model.tiny is not None
    return ModelSource(tiny_spec(model.tiny, head), None, config.seed, role, weights_role)


def tiny_spec(tiny: TinyConfig, head: Head = "lm") -> ModelSpec:
    """Return the sizes of a random model."""
    return ModelSpec(
        family=tiny.family,
        vocab=tiny.vocab,
        hidden=tiny.hidden,
        layers=tiny.layers,
        heads=tiny.heads,
        kv_heads=tiny.kv_heads,
        head_dim=tiny.hidden // tiny.heads,
        intermediate=tiny.intermediate,
        tie_embeddings=tiny.tie_embeddings,
        qkv_bias=tiny.family == "qwen2",
        qk_norm=tiny.family == "qwen3",
        head=head,
    )


def _tokenizer_path(config: RunConfig) -> str:
    if config.model.path is not None:
        return os.path.expanduser(resolve_path(config.model.path))
    assert config.model.tiny is not None
    return resolve_path(config.model.tiny.tokenizer)


def _load_tokenizer(path: str, key: str) -> Any:
    from transformers import AutoTokenizer  # takes a second to import: only a run needs it

    try:
        with fetch_tokenizer(path) as folder:
            return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ValueError(
            f"{key}: {path} has no tokenizer that loads ({reason}); put tokenizer.json beside it."
        ) from None


def _reward_tokenizer(
    config: RunConfig, actor_tokenizer: Any, actor: ModelSpec, reward: ModelSpec | None
) -> Any | None:
    """Return the reward model's tokenizer, or None where it can take every token that the actor may draw."""
    if config.reward.model is None or reward is None:
        return None
    tokenizer = _load_tokenizer(os.path.expanduser(resolve_path(config.reward.model)), "reward.model")
    same = tokenizer.get_vocab() == actor_tokenizer.get_vocab()
    return None if same and reward.vocab >= actor.vocab else tokenizer


def _eos_ids(config: RunConfig, tokenizer: Any) -> tuple[int, ...]:
    if not config.rollout.stop_at_eos:
        return ()
    named = read_eos_ids(_tokenizer_path(config)) if config.model.path is not None else ()
    ids = tuple(named) or ((tokenizer.eos_token_id,) if tokenizer.eos_token_id is not None else ())
    if not ids:
        raise ValueError("model: the tokenizer names no EOS token; name one, or set rollout.stop_at_eos to false.")
    return ids


def _check_lengths(config: RunConfig, sources: Mapping[str, ModelSource]) -> None:
    wanted = config.rollout.max_prompt_tokens + config.rollout.max_response_tokens
    for name, source in sources.items():
        if wanted > source.spec.max_positions:
            raise ValueError(
                f"rollout.max_prompt_tokens + rollout.max_response_tokens = {wanted} is more than the "
                f"{source.spec.max_positions} positions of {name}; lower one of them."
            )


def _check_devices(config: RunConfig) -> None:
    if config.cluster.device == "cuda" and torch.cuda.device_count() < config.cluster.devices:
        raise ValueError(
            f"cluster.devices is {config.cluster.devices}, but this host has {torch.cuda.device_count()} CUDA devices; "
            "lower it, or set cluster.device to cpu."
        )


def _stages_remotely(config: RunConfig) -> bool:
    root = config.staging.root or config.run_dir
    return root is not None and local_path(root) is None


def _capacities(config: RunConfig) -> dict[int, int]:
    cluster = local_cluster(
        config.cluster.devices,
        config.cluster.memory_per_device,
        threads_per_device=config.cluster.threads_per_device,
    )
    return {device.id: device.memory_bytes for device in cluster.devices}


def _check_places(config: RunConfig) -> None:
    models = {"model": config.model, "critic": config.critic, "reference": config.reference}
    sources = {f"{name}.path": model.path for name, model in models.items()}
    for field, place in {**sources, "reward.model": config.reward.model, "data.prompts": config.data.prompts}.items():
        refuse_credentials(place or "", field)
    for field, url in (("run_dir", config.run_dir), ("staging.root", config.staging.root)):
        if url is not None and isinstance(open_filesystem(url)[0], MemoryFileSystem):
            raise ValueError(
                f"{field}: {url} lies in the memory of one process, and a run has several; "
                "choose a directory or an object store."
            )
