"""The package from Python:

from ragen import train

run = train("sokoban", "model_path=pocket", "trainer.total_training_steps=20")     # as on the command line
run = train(config)                                                                # or a `Config`
run.status, run.folder, run.report
"""

from typing import TYPE_CHECKING, Any

from ragen.errors import ConfigError
from ragen.machine import check_platform, prefer_growing_segments

if TYPE_CHECKING:
    from ragen.config.schema import Config
    from ragen.run.session import Run


def train(*overrides: Any, config_name: str | None = None, config_dir: str | None = None) -> "Run":
    """Train, and return how it ended. Bad overrides raise `ConfigError` before anything is loaded."""
    check_platform()
    from ragen.config.schema import Config
    from ragen.run.prepare import prepare

    if len(overrides) == 1 and isinstance(overrides[0], Config):
        return run_config(overrides[0])
    return run_config(prepare(list(overrides), config_name, config_dir).config)


def run_config(config: "Config", stage: str | None = None) -> "Run":
    """Reinforcement learning; with `rl_or_sft=sft` supervised fine-tuning, with `sft_then_rl` one after the other.

    `stage` is `sft` or `rl`, for one of these two alone.
    """
    check_stage(config, stage)
    prefer_growing_segments()
    if config.rl_or_sft == "sft":
        from ragen.sft.run import fine_tune

        return fine_tune(config)
    if config.rl_or_sft == "sft_then_rl":
        from ragen.sft.then_rl import tune_then_train

        return tune_then_train(config, stage)
    from ragen.train.trainer import train

    return train(config)


def check_stage(config: "Config", stage: str | None) -> None:
    if stage is not None and config.rl_or_sft != "sft_then_rl":
        raise ConfigError(f"--stage {stage}: rl_or_sft={config.rl_or_sft} has a single stage; omit --stage")
