"""prefect.yaml holds what the recipes hold."""

from pathlib import Path

import yaml

from nereus.config import build_config, list_recipes, load_config

ROOT = Path(__file__).resolve().parents[2]


def test_every_recipe_is_a_deployment_with_its_own_config():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    configs = {entry["name"]: build_config(entry["parameters"]["config"]) for entry in deployments}
    assert configs == {recipe: load_config(recipe) for recipe in list_recipes()}


def test_entrypoints_are_modules():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    assert {entry["entrypoint"] for entry in deployments} == {"flows.ppo.train_ppo"}
