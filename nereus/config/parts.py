"""The parts of a run config. Each room gets its own part, never the whole.

Every part is frozen and refuses unknown keys; every key has a default and a description with its unit, because the
same models draw the form in Prefect's UI.
"""

import math
import re
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)

_UNITS = {"": 1, "B": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
_UNITS |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


class ConfigError(ValueError):
    """A run config that can't be used; the message is one sentence with the field, the value and the mend."""


def parse_bytes(size: Any) -> int:
    """Return a size such as `2GiB`, `1.5 GB` or 4096 in bytes.

    Raises:
        ValueError: it is no size, or not above 0.
    """
    found = re.fullmatch(r"\s*([0-9]+(?:\.[0-9]*)?(?:[eE]\+?[0-9]+)?)\s*([A-Za-z]*)\s*", str(size))
    if found is None or isinstance(size, bool) or found[2].upper() not in _UNITS:
        raise ValueError(f"{size!r} is no size; write it like 2GiB, 512MiB or 4096 (bytes)")
    exact = float(found[1]) * _UNITS[found[2].upper()]
    if not math.isfinite(exact):
        raise ValueError(f"{size!r} is beyond any memory")
    num_bytes = round(exact)
    if num_bytes <= 0:
        raise ValueError(f"{size!r} must be above 0")
    return num_bytes


def format_bytes(num_bytes: int) -> str:
    """Return a size in bytes as the shortest text that `parse_bytes` reads back exactly."""
    for unit in ("TiB", "GiB", "MiB", "KiB"):
        if num_bytes % _UNITS[unit.upper()] == 0:
            return f"{num_bytes // _UNITS[unit.upper()]}{unit}"
    return str(num_bytes)


Size = Annotated[
    int,
    BeforeValidator(parse_bytes),
    PlainSerializer(format_bytes, return_type=str),
    WithJsonSchema({"type": "string", "examples": ["2GiB", "512MiB"]}),
]


class Part(BaseModel):
    """Base of all parts: frozen, and an unknown key is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def _empty_is_none(text: Any) -> Any:
    return None if text == "" else text


# A text that may be left empty; a form hands an emptied field over as "".
OptionalText = Annotated[str | None, BeforeValidator(_empty_is_none)]


class TinyConfig(Part):
    """A small decoder with random weights, for tests and demos."""

    family: Literal["llama", "mistral", "qwen2", "qwen3"] = Field("llama", description="Architecture.")
    hidden: int = Field(128, gt=0, description="Width of the hidden state.")
    layers: int = Field(4, gt=0, description="Number of decoder layers.")
    heads: int = Field(4, gt=0, description="Number of attention heads.")
    kv_heads: int = Field(2, gt=0, description="Number of key and value heads; divides `heads`.")
    intermediate: int = Field(256, gt=0, description="Width of the MLP.")
    vocab: int = Field(16, gt=3, description="Vocabulary in tokens; at least that of the tokenizer.")
    tie_embeddings: bool = Field(False, description="Use the embedding as the output layer too.")
    tokenizer: str = Field(
        "pkg://nereus.recipes/char-tokenizer",
        description="Hugging Face tokenizer directory; the default is a tokenizer of 13 characters.",
    )

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.heads % self.kv_heads:
            raise ValueError(f"kv_heads {self.kv_heads} must divide heads {self.heads}")
        if self.hidden % (2 * self.heads):
            raise ValueError(f"hidden {self.hidden} must be a multiple of 2 * heads, that is of {2 * self.heads}")
        return self


class OptionalModelConfig(Part):
    """Where a model's weights come from; neither key means the actor's weights."""

    path: OptionalText = Field(None, description="Hugging Face model directory or URI; empty: the actor's weights.")
    tiny: TinyConfig | None = Field(None, description="A small random model instead of a path.")

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if self.path is not None and self.tiny is not None:
            raise ValueError("`path` and `tiny` are both set; leave one of them empty")
        return self


class ModelConfig(OptionalModelConfig):
    """Where the actor's weights come from: exactly one of `path` and `tiny`."""

    path: OptionalText = Field(None, description="Hugging Face model directory or URI.")

    @model_validator(mode="after")
    def _check_a_source(self) -> Self:
        if self.path is None and self.tiny is None:
            raise ValueError("neither `path` nor `tiny` is set; give a Hugging Face directory or a tiny model")
        return self


class RewardConfig(Part):
    """Who scores a response: exactly one of a Python function and a reward model."""

    function: OptionalText = Field(
        None, description="`package.module:name`, called as f(prompt: str, response: str, example: dict) -> float."
    )
    model: OptionalText = Field(None, description="Hugging Face sequence classification directory or URI.")
    timeout_s: float = Field(10.0, gt=0, description="Longest time for one call of the function, in seconds.")
    workers: int = Field(1, gt=0, description="Processes that call the function.")

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.function is None) == (self.model is None):
            which = "neither `function` nor `model` is" if self.function is None else "`function` and `model` are both"
            raise ValueError(f"{which} set; give exactly one of them")
        if self.function is not None and not re.fullmatch(r"[\w.]+:\w+", self.function):
            raise ValueError(f"function {self.function!r} must read `package.module:name`")
        return self


class DataConfig(Part):
    """The prompts."""

    prompts: str = Field(
        "pkg://nereus.recipes/words.jsonl",
        description='JSONL file or URI; one object a line with "prompt" (text or chat messages). All other keys '
        "reach the reward function as `example`.",
    )


class RolloutConfig(Part):
    """How responses are made."""

    prompts_per_step: int = Field(32, gt=0, description="Prompts a step.")
    samples_per_prompt: int = Field(1, gt=0, description="Responses a prompt.")
    max_prompt_tokens: int = Field(128, gt=0, description="Longer prompts are dropped before the run, in tokens.")
    max_response_tokens: int = Field(128, gt=0, description="Longest response, in tokens.")
    temperature: float = Field(1.0, gt=0, description="Sampling temperature; log-probs and KL are taken at it too.")
    top_p: float = Field(1.0, gt=0, le=1, description="Smallest probability mass that sampling keeps, in (0, 1].")
    stop_at_eos: bool = Field(True, description="End a response at EOS; false samples the longest response always.")

    @property
    def samples_per_step(self) -> int:
        """Responses of one step."""
        return self.prompts_per_step * self.samples_per_prompt


_Beta = Annotated[float, Field(ge=0, lt=1)]


class PPOConfig(Part):
    """The algorithm and its optimizers."""

    epochs: int = Field(1, gt=0, description="Passes over the rollouts of a step.")
    minibatches: int = Field(2, gt=0, description="Optimizer updates an epoch.")
    micro_batch: Literal["auto"] | Annotated[int, Field(gt=0)] = Field(
        "auto", description="Most samples in one packed micro-batch of one replica where the plan names none."
    )
    gamma: float = Field(1.0, ge=0, le=1, description="Discount a token.")
    lam: float = Field(0.95, ge=0, le=1, description="Lambda of generalised advantage estimation.")
    clip: float = Field(0.2, gt=0, description="Largest change of the probability ratio that counts.")
    value_clip: float = Field(0.2, gt=0, description="Largest change of a value that counts.")
    kl_coef: float = Field(0.05, ge=0, description="Weight of the KL to the reference in the reward; the first one "
                           "where it adapts.")  # fmt: skip
    kl_adaptive: bool = Field(False, description="Adapt the KL weight once a step towards `kl_target`.")
    kl_target: float = Field(6.0, gt=0, description="Wanted KL summed over a response, in nats.")
    kl_horizon: int = Field(10_000, gt=0, description="Samples over which the KL weight adapts.")
    no_eos_penalty: float = Field(0.0, ge=0, description="Taken off the score of a response without EOS.")
    actor_lr: float = Field(1e-6, ge=0, description="Learning rate of the actor.")
    critic_lr: float = Field(1e-5, ge=0, description="Learning rate of the critic.")
    lr_schedule: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="Course of both learning rates after the warm-up, by updates done."
    )
    lr_warmup_updates: int = Field(0, ge=0, description="Updates over which both learning rates rise from 0.")
    lr_decay_updates: int = Field(1000, gt=0, description="Updates at which a linear or cosine schedule reaches 0.")
    betas: tuple[_Beta, _Beta] = Field((0.9, 0.999), description="Decay of AdamW's two moments, each in [0, 1).")
    eps: float = Field(1e-5, gt=0, description="AdamW's epsilon.")
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay.")
    grad_clip: float = Field(1.0, gt=0, description="Largest norm of the whole gradient.")

    @property
    def most_micro_batch(self) -> int | None:
        """Most samples in a micro-batch; None: as many as memory takes."""
        return None if self.micro_batch == "auto" else self.micro_batch


class ClusterConfig(Part):
    """The devices that the run may use."""

    engine: Literal["local"] = Field("local", description="Where workers live: `local` = processes on this host.")
    device: Literal["cpu", "cuda"] = Field("cpu", description="Kind of device.")
    devices: int = Field(2, gt=0, description="Number of devices: CPU slots or CUDA devices.")
    threads_per_device: int = Field(1, gt=0, description="Cores of one CPU slot.")
    memory_per_device: Size = Field(2 * 2**30, description="Memory that a worker may hold on its device, e.g. 2GiB.")


class StagingConfig(Part):
    """Where and how often the state is committed that a run can go on from."""

    root: OptionalText = Field(None, description="Directory or URI of the staged sets; empty: RUN_DIR/state.")
    every: int = Field(1, gt=0, description="Steps from one commit to the next; the last step is always committed.")
    keep: int = Field(2, gt=0, description="Newest commits that are kept; older ones are removed.")
    lease_s: float = Field(
        30.0, ge=1, le=3600, description="Silence after which a driver on another host counts as dead, in seconds."
    )
