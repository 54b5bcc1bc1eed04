"""What this version can train. A setting that would be ignored is refused, by name, before anything is loaded."""

from ragen.config.schema import Config
from ragen.typed import ConfigError


def check(config: Config) -> None:
    """Raise `ConfigError` for everything that is not built yet."""
    unbuilt: dict[str, bool] = {}
    problems = [f"{what} is not built yet" for what, asked in unbuilt.items() if asked]
    if problems:
        listed = "".join(f"\n  - {problem}" for problem in problems)
        raise ConfigError(f"this version cannot train that:{listed}\n--dry-run shows the resolved plan all the same")
