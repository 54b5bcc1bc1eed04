"""The config a tag is trained with: the v1 environment or the recipe that names it, not the tree's defaults.

training_config("FrozenLakeV1").agent_proxy.max_actions_per_turn    # 1: `train.sh frozenlake`
training_config("BanditTest").agent_proxy.max_turn                  # 1: recipe _1_bandit
"""

from omegaconf import OmegaConf

from ragen.config import v1
from ragen.config.compose import resolve
from ragen.config.recipe import compose_recipe, recipe_names
from ragen.config.schema import Config


def recipe_of(tag: str) -> str | None:
    """The recipe that names a tag; None for tags that only the tree's defaults name."""
    for name in recipe_names():
        recipe = compose_recipe(name)
        for split in ("train", "val"):
            if tag in OmegaConf.select(recipe, f"es_manager.{split}.env_configs.tags", default=()):
                return name
    return None


def training_config(tag: str) -> Config:
    """The config that the tag is trained with; the tree's defaults where nothing names it."""
    for environment, start in v1.ENVIRONMENTS.items():
        if start.tag == tag:
            # With its model named: `pocket` would choose another board.
            return resolve([environment, f"model.base_model={v1.KEYS['model.base_model'].default}"], environ={}).config
    return resolve([], config_name=recipe_of(tag), environ={}).config
