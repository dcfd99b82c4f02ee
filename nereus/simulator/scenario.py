"""A simulation scenario as YAML holds it: every key, its default and its unit."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import Field, field_validator, model_validator

from nereus.catalog import MOST_DEVICES
from nereus.config.drift_parts import DeviceFile
from nereus.config.parts import Part, Size
from nereus.cost.efficiency import CLASSES

Policy = Literal["fixed", "every_k", "any_gain", "payback", "oracle"]
LengthPoint = Annotated[list[float], Field(min_length=2, max_length=3)]
DeviceEntry = tuple[int, int] | tuple[int, int, Literal["lost"]]
Positive = Annotated[float, Field(gt=0)]
SlowEntry = tuple[Annotated[int, Field(ge=0)], int | Literal["intra_node", "inter_node", "storage"], Positive]


class ModelSource(Part):
    """Which model: exactly one of `preset` and `path`."""

    preset: str | None = Field(None, description="A model by name, for example llama-3.1-8b.")
    path: str | None = Field(None, description="Hugging Face model directory or config.json.")

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        if (self.preset is None) == (self.path is None):
            raise ValueError("give exactly one of `preset` and `path`")
        return self


class ClusterSource(Part):
    """The whole allocation: a preset of the catalog, or all numbers by hand. Bandwidths are nominal, each way."""

    preset: str | None = Field(None, description="A cluster of the catalog, for example a100-64gb-hdr.")
    devices: int | None = Field(
        None, gt=0, le=MOST_DEVICES, description="Devices; empty: the preset's. More add nodes of its kind."
    )
    devices_per_node: int | None = Field(None, gt=0, description="By hand: devices of a node.")
    memory_per_device: Size | None = Field(None, description="By hand: memory of a device.")
    peak_flops: Positive | None = Field(None, description="By hand: peak of a device in bfloat16, FLOP/s.")
    memory_bytes_s: Positive | None = Field(None, description="By hand: memory bandwidth of a device, bytes/s.")
    intra_node_bytes_s: Positive | None = Field(None, description="By hand: link of a device inside its node, bytes/s.")
    inter_node_bytes_s: Positive | None = Field(None, description="By hand: link of a node to the others, bytes/s.")
    storage_bytes_s: Positive | None = Field(None, description="By hand: link of a node to storage, bytes/s.")

    @property
    def by_hand(self) -> dict[str, float | int | None]:
        names = [name for name in type(self).model_fields if name not in ("preset", "devices")]
        return {name: getattr(self, name) for name in names}

    @model_validator(mode="after")
    def _check_one_source(self) -> Self:
        given = [name for name, value in self.by_hand.items() if value is not None]
        missing = [name for name, value in {**self.by_hand, "devices": self.devices}.items() if value is None]
        if self.preset is not None and given:
            raise ValueError(f"`preset` and `{given[0]}` are both set; give a preset, or all numbers by hand")
        if self.preset is None and missing:
            raise ValueError(f"`{missing[0]}` is not set; give a `preset`, or all numbers by hand")
        return self


class WorkloadSource(Part):
    """What a step works on."""

    algorithm: Literal["ppo", "grpo"] = Field("ppo", description="grpo has no critic.")
    prompts_per_step: int = Field(1024, gt=0, description="Prompts a step.")
    samples_per_prompt: int = Field(1, gt=0, description="Responses a prompt.")
    prompt_tokens: float = Field(512, gt=0, description="Mean length of a prompt, in tokens.")
    response_tokens: Positive | list[LengthPoint] | str = Field(
        ..., description="Mean response length in tokens: a number, [[step, mean], ...] linear in between, or a CSV."
    )
    p95_over_mean: float = Field(1.15, ge=1, description="95th percentile over mean where the trace names none.")
    max_response_tokens: int | None = Field(None, gt=0, description="Length cap in tokens; empty: none is reached.")
    minibatches: int = Field(4, gt=0, description="Optimizer updates an epoch.")
    epochs: int = Field(1, gt=0, description="Passes over the rollouts of a step.")

    @field_validator("response_tokens", mode="before")
    @classmethod
    def _read_number(cls, value: Any) -> Any:
        if isinstance(value, bool):
            raise ValueError(f"{value} is no length; give a number of tokens, [[step, mean], ...] or a CSV")
        # YAML takes 1e3 and nan for text, and text would be the name of a CSV.
        try:
            return float(value) if isinstance(value, str) else value
        except ValueError:
            return value

    @model_validator(mode="after")
    def _check_minibatches(self) -> Self:
        samples = self.prompts_per_step * self.samples_per_prompt
        if self.minibatches > samples:
            raise ValueError(f"minibatches {self.minibatches} is above the {samples} samples of a step; lower it")
        return self


class TraceFile(DeviceFile):
    """Devices from a file, or from a shipped one where the file's folder isn't known."""

    fallback: str | None = Field(None, description="A trace shipped with Nereus for when NEREUS_TRACES isn't set.")


class Truth(Part):
    """What the hardware really does, hidden from the controller; what is left out is as public figures have it."""

    efficiency: dict[str, Annotated[float, Field(gt=0, le=1)]] = Field({}, description="Share of the peak, by class.")
    latency_s: dict[str, Annotated[float, Field(ge=0)]] = Field({}, description="Latency by class, in seconds.")
    host_s: float | None = Field(None, ge=0, description="Host time of a micro-batch or decoding pass, in seconds.")
    memory_factor: float = Field(1.0, gt=0, description="True memory peak over the predicted one.")
    noise: float = Field(0.02, ge=0, lt=0.5, description="Standard deviation of measured times, relative.")
    seed: int = Field(0, ge=0, description="Seed of the noise.")
    slow: list[SlowEntry] = Field(
        [], description="[step, device id or link, factor]: from that step on it takes `factor` times as long."
    )

    @field_validator("efficiency", "latency_s")
    @classmethod
    def _check_classes(cls, numbers: dict[str, float]) -> dict[str, float]:
        for name in numbers:
            if name not in CLASSES:
                raise ValueError(f"{name!r} is no operation class; they are {', '.join(CLASSES)}")
        return numbers


class Scenario(Part):
    """Policies over a trace of devices and lengths, in virtual time."""

    model: ModelSource = Field(..., description="The actor.")
    critic: ModelSource | None = Field(None, description="Empty: as large as the actor.")
    reference: ModelSource | None = Field(None, description="Empty: as large as the actor.")
    reward: ModelSource | None = Field(None, description="Empty: as large as the actor.")
    cluster: ClusterSource = Field(..., description="The whole allocation; `devices` says how much of it there is.")
    workload: WorkloadSource = Field(..., description="What a step works on.")
    devices: list[DeviceEntry] | TraceFile | None = Field(
        None, description="[[step, n], ...] ids 0..n-1 from that step on ([step, n, lost]: without notice), or a file."
    )
    steps: int = Field(26, gt=0, description="Steps to simulate.")
    truth: Truth = Field(Truth(), description="What the hardware really does.")
    policies: list[Policy] = Field(
        ["fixed", "every_k", "any_gain", "payback", "oracle"], min_length=1, description="Policies to compare."
    )
    gamma: float = Field(0.5, ge=0, le=1, description="Share of the horizon within which a move must pay.")
    delta_length: float = Field(0.3, gt=0, description="Relative change of the length that triggers a replan.")
    every: int = Field(3, gt=0, description="The k of every_k.")
    precision: Literal["float32", "bfloat16"] = Field("bfloat16", description="Precision of compute.")
