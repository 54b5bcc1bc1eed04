"""Fine-tuning on the scale of a test: an untrained pocket, short prompts, a handful of levels."""

from pathlib import Path
from typing import Any

from ragen.api import run_config
from ragen.config.schema import Config
from ragen.run.interrupt import Interrupt
from ragen.run.prepare import prepare

WORDS = (
    "rl_or_sft=sft",
    "sft.training.base_model=pocket-blank",
    "sft.data_generation.train_size=8",
    "sft.data_generation.test_size=3",
    "sft.training.train_batch_size=8",
    "sft.training.epochs=2",
    "sft.training.learning_rate=1e-3",
    "sft.training.lora_rank=4",
    "sft.training.logger=[console]",
    "agent_proxy.prompt_style=terse",
    "actor_rollout_ref.rollout.response_length=12",
    "training.val_data_num=2",
    "training.n_rollout=1",
)


def config_of(*words: str, environment: str = "sokoban") -> Config:
    grid = [] if environment == "two_armed_bandit" else ["env.env_kwargs.cell_format=plain"]
    return prepare([environment, *WORDS, *grid, *words], environ={}).config


def fine_tuned(output: Path, *words: str) -> Any:
    return run_config(config_of(f"sft.output_dir={output}", *words))


class Pressed(Interrupt):
    """Ctrl-C from the first step on."""

    def __init__(self, note: Any, seconds: float):
        super().__init__(note)
        self.is_set = True
