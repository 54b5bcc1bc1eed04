"""Recipes: YAML files that hold only differences from the schema's defaults. Hydra composes them.

compose_recipe("_2_sokoban"), compose_recipe("mine", config_dir="my/recipes")
"""

from copy import deepcopy
from functools import cache
from pathlib import Path

import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ragen.config.quoting import override
from ragen.errors import ConfigError, nearest_of

BUILT_IN = Path(__file__).parent / "recipes"


def recipe_names() -> list[str]:
    return sorted(path.stem for path in BUILT_IN.glob("*.yaml"))


def recipe_of(tag: str) -> str | None:
    """The recipe that names a tag; None for tags that only the tree's defaults name."""
    for name in recipe_names():
        for split in ("train", "val"):
            if tag in OmegaConf.select(compose_recipe(name), f"es_manager.{split}.env_configs.tags", default=()):
                return name
    return None


def is_packaged(name: str, config_dir: str | None = None) -> bool:
    """Whether a recipe is one of ours, not the user's."""
    return config_dir is None or not Path(config_dir, f"{name.removesuffix('.yaml')}.yaml").is_file()


def compose_recipe(name: str, config_dir: str | None = None) -> DictConfig:
    """What a recipe and those it builds on set, references unresolved. Recipes in `config_dir` come first."""
    name = name.removesuffix(".yaml")
    if config_dir is None:
        return deepcopy(_built_in(name))
    if not Path(config_dir).is_dir():
        raise ConfigError(f"--config-dir {config_dir}: not a directory", key="--config-dir", code="no-directory")
    return _composed(name, [Path(config_dir).resolve(), BUILT_IN])


@cache
def _built_in(name: str) -> DictConfig:
    """Cached: an experiment composes the same recipe many times, and Hydra is slow."""
    return _composed(name, [BUILT_IN])


def _composed(name: str, folders: list[Path]) -> DictConfig:
    known = sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})
    if name not in known:
        message = f"--config-name {name or repr(name)}: no such recipe{nearest_of(name, known)}"
        raise ConfigError(message, key="--config-name", code="unknown-recipe")
    home = next(folder for folder in folders if (folder / f"{name}.yaml").is_file())
    others = [f"file://{folder}" for folder in folders if folder != home]
    GlobalHydra.instance().clear()
    try:
        with initialize_config_dir(str(home), version_base="1.3"):
            recipe = compose(name, overrides=[override("hydra.searchpath", others)] if others else [])
    except (HydraException, OmegaConfBaseException, yaml.YAMLError, UnicodeDecodeError, OSError) as error:
        raise ConfigError(f"recipe {home / name}.yaml: {error}", key=name, code="bad-recipe") from error
    OmegaConf.set_struct(recipe, False)
    return recipe
