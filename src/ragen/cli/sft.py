"""Fine-tune a model on solved levels, merge the best epoch and validate it: ragen train with rl_or_sft=sft.

examples:
  ragen sft sokoban sft.training.base_model=Qwen/Qwen2.5-0.5B-Instruct --dry-run
  ragen sft frozenlake sft.training.base_model=smollm2 \\
      sft.data_generation.train_size=500 sft.output_dir=models/sft/frozenlake
  ragen train sokoban rl_or_sft=sft_then_rl sft.output_dir=models/sft/sokoban
"""

import argparse
from collections.abc import Sequence

from ragen.cli import train
from ragen.errors import ConfigError


def parser() -> argparse.ArgumentParser:
    return train.run_parser("sft", __doc__)


def run(arguments: Sequence[str]) -> int:
    for override in parser().parse_intermixed_args(arguments).overrides:
        key, _, value = override.partition("=")
        if key.strip().lstrip("+~") == "rl_or_sft" and value.strip(" '\"") != "sft":
            raise ConfigError(f"{override}: ragen sft only fine-tunes; use ragen train … {override}")
    return train.run([*arguments, "rl_or_sft=sft"])
