"""The stages of training, and training itself:

    from ragen import train

    run = train("sokoban", "model_path=pocket", "trainer.total_training_steps=20")     # the words of the command line
    run = train(config)                                                                # or a `Config`
    run.status, run.folder, run.report

The folder of the stages and the verb have one name, so this module can be called.
"""

import sys
from types import ModuleType
from typing import TYPE_CHECKING, Any

from ragen.errors import ConfigError

if TYPE_CHECKING:
    from ragen.config.schema import Config
    from ragen.train.loop import Run


class _Train(ModuleType):
    def __call__(self, *words: Any, config_name: str | None = None, config_dir: str | None = None) -> "Run":
        """Train, and return how it ended. Bad words raise `ragen.typed.ConfigError` before anything is loaded."""
        from ragen.config.schema import Config
        from ragen.run.prepare import prepare as resolve

        if len(words) == 1 and isinstance(words[0], Config):
            config = words[0]
        else:
            config = resolve(list(words), config_name, config_dir).config
        return train_any(config)


def train_any(config: "Config", stage: str | None = None) -> "Run":
    """Reinforcement learning, with `rl_or_sft=sft` supervised fine-tuning, with `sft_then_rl` one after the other.

    `stage` is `sft` or `rl`, for one of these two alone.
    """
    check_stage(config, stage)
    if config.rl_or_sft == "sft":
        from ragen.sft.run import fine_tune

        return fine_tune(config)
    if config.rl_or_sft == "sft_then_rl":
        from ragen.sft.then_rl import tune_then_train

        return tune_then_train(config, stage)
    from ragen.train.loop import train

    return train(config)


def check_stage(config: "Config", stage: str | None) -> None:
    if stage is not None and config.rl_or_sft != "sft_then_rl":
        raise ConfigError(f"--stage {stage}: there is but one stage with rl_or_sft={config.rl_or_sft}; leave it out")


sys.modules[__name__].__class__ = _Train
