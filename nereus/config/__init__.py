"""Run configuration: what the YAML holds, the command line overrides and the Prefect form shows."""

from nereus.config.drift_parts import AdaptConfig, DeviceFile, DeviceTrace, DriftConfig
from nereus.config.load import build_config, dump_config, list_recipes, load_config, override_config, resolve_path
from nereus.config.parts import (
    ClusterConfig,
    ConfigError,
    DataConfig,
    ModelConfig,
    OptionalModelConfig,
    PPOConfig,
    RewardConfig,
    RolloutConfig,
    StagingConfig,
    TinyConfig,
    format_bytes,
    parse_bytes,
)
from nereus.config.plan_parts import PlanEntry
from nereus.config.run import RunConfig

__all__ = [
    "AdaptConfig",
    "ClusterConfig",
    "ConfigError",
    "DataConfig",
    "DeviceFile",
    "DeviceTrace",
    "DriftConfig",
    "ModelConfig",
    "OptionalModelConfig",
    "PPOConfig",
    "PlanEntry",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "StagingConfig",
    "TinyConfig",
    "build_config",
    "dump_config",
    "format_bytes",
    "list_recipes",
    "load_config",
    "override_config",
    "parse_bytes",
    "resolve_path",
]
