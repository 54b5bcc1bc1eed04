"""What this version can train. A setting that would be ignored is refused, by name, before anything is loaded."""

from ragen.config.schema import Config
from ragen.typed import ConfigError


def check(config: Config) -> None:
    """Raise `ConfigError` for everything that is not built yet, or that cannot work together."""
    trainer, proxy = config.trainer, config.agent_proxy
    unbuilt = {
        "rl_or_sft=sft": config.rl_or_sft == "sft",
        "lora.rank above 0": config.lora.rank > 0,
        "trainer.gradient_analysis_mode": trainer.gradient_analysis_mode,
    }
    problems = [f"{what} is not built yet" for what, asked in unbuilt.items() if asked]
    if proxy.use_turn_scores and proxy.reward_normalization.method != "identity":
        problems.append(
            f"agent_proxy.reward_normalization.method={proxy.reward_normalization.method} compares whole episodes, and "
            f"agent_proxy.use_turn_scores=True scores turns: choose one of them"
        )
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"this version cannot train that:{listed}\n--dry-run shows the resolved plan all the same")
