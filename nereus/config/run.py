"""The whole run config."""

from typing import Annotated, Literal, Self

from pydantic import BeforeValidator, Field, model_validator

from nereus.config.drift_parts import AdaptConfig, DriftConfig
from nereus.config.parts import (
    ClusterConfig,
    DataConfig,
    ModelConfig,
    OptionalModelConfig,
    OptionalText,
    Part,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    StagingConfig,
    TinyConfig,
)
from nereus.config.plan_parts import OnePlan, PlanSchedule, check_plan_form


class RunConfig(Part):
    """One PPO run. Every key has a default; without arguments it trains a tiny random model."""

    model: ModelConfig = Field(ModelConfig(tiny=TinyConfig()), description="The actor's weights.")
    critic: OptionalModelConfig = Field(
        OptionalModelConfig(), description="The critic's weights; its value head is always fresh."
    )
    reference: OptionalModelConfig = Field(OptionalModelConfig(), description="The frozen reference's weights.")
    reward: RewardConfig = Field(
        RewardConfig(function="nereus.recipes.rewards:score_vowels"), description="What scores a response."
    )
    data: DataConfig = Field(DataConfig(), description="Where the prompts come from.")
    rollout: RolloutConfig = Field(RolloutConfig(), description="Prompts and responses of a step.")
    ppo: PPOConfig = Field(PPOConfig(), description="Losses, penalties and optimizers.")
    precision: Literal["float32", "bfloat16", "float64"] = Field(
        "float32", description="Precision of compute; bfloat16 keeps float32 master weights."
    )
    steps: int = Field(20, gt=0, description="PPO steps.")
    seed: int = Field(0, ge=0, lt=2**63, description="Seed of everything that is drawn.")
    run_dir: OptionalText = Field(None, description="Directory or URI that holds all of the run; empty: runs/<run id>.")
    cluster: ClusterConfig = Field(ClusterConfig(), description="The devices.")
    plan: Annotated[OnePlan | PlanSchedule, BeforeValidator(check_plan_form)] = Field(
        "auto",
        description="`auto`, or where each model-stage runs; or a schedule [[0, plan], [4, plan], ...] of plans, each "
        "from its step on.",
    )
    adapt: AdaptConfig = Field(AdaptConfig(), description="How the plan follows a world that changes.")
    transport: Literal["auto", "direct", "staged"] = Field(
        "auto",
        description="How state moves when the plan changes: `direct` between workers, `staged` through storage; "
        "`auto` takes the faster one that memory allows.",
    )
    staging: StagingConfig = Field(StagingConfig(), description="Commits that the run can be resumed from.")
    drift: DriftConfig = Field(DriftConfig(), description="Which devices there are, step by step.")
    tracking: tuple[Literal["tensorboard", "wandb"], ...] = Field((), description="Trackers fed with the metrics.")

    @model_validator(mode="after")
    def _check_minibatches(self) -> Self:
        samples = self.rollout.samples_per_step
        if self.ppo.minibatches > samples:
            raise ValueError(
                f"ppo.minibatches {self.ppo.minibatches} is above the {samples} samples of a step; "
                "lower it or raise rollout.prompts_per_step"
            )
        return self

    @model_validator(mode="after")
    def _check_trace(self) -> Self:
        most = self.drift.most_devices()
        if most is not None and most[1] > self.cluster.devices:
            raise ValueError(
                f"drift.devices has {most[1]} devices at step {most[0]}, but cluster.devices is "
                f"{self.cluster.devices}; lower it, or raise cluster.devices"
            )
        return self
