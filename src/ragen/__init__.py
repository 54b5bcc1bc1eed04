"""RAGEN trains language-model agents by multi-turn reinforcement learning, and shows why a run learns or collapses.

    from ragen import train

    run = train("sokoban", "model_path=pocket")

Importing this package loads nothing heavy: torch, transformers and ray are imported by the stages that use them.
"""

from types import ModuleType
from typing import Any

__version__ = "0.1.0"


class CallableTrain(ModuleType):
    """`ragen.train`: a folder of stages, and a verb."""

    def __call__(self, *overrides: Any, config_name: str | None = None, config_dir: str | None = None) -> Any:
        from ragen.api import train

        return train(*overrides, config_name=config_name, config_dir=config_dir)
