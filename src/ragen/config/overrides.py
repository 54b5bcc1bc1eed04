"""Read what a user typed: overrides on the command line, and the `CONFIG_*` variables of the v1 command line.

    environment, overrides = split_environment(["sokoban", "training.n_rollout=8"], config_name=None)
    typed = read_overrides(overrides, environment)             # [Typed("training.n_rollout", 8)]

Hydra parses the override grammar. A group of keys is split (`lora={rank: 8}` is `lora.rank=8`). In the result, every
name is known and every value has the type of its key.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException

from ragen.config import devices, keys, v1
from ragen.config.recipe import recipe_names
from ragen.config.tree import GROUP
from ragen.errors import ConfigError, raise_any, refused, shown

COMMAND_LINE = "command line"


@dataclass(frozen=True)
class Typed:
    """One key as the user set it. `~key` resets it; `~key=value` only if that is the current value."""

    key: str
    value: Any
    delete: bool = False
    origin: str = COMMAND_LINE  # or: variable CONFIG_…

    @property
    def name(self) -> str:
        """What the user calls the key."""
        return self.key if self.origin == COMMAND_LINE else self.origin


def split_environment(arguments: list[str], config_name: str | None) -> tuple[str | None, list[str]]:
    """The environment's name, if one was given, and the overrides."""
    names = [argument for argument in arguments if "=" not in argument and not argument.startswith("~")]
    overrides = [argument for argument in arguments if argument not in names]
    if not names:
        return None, overrides
    raise_any(_not_an_override(name) for name in names if name not in v1.ENVIRONMENTS)
    if len(set(names)) > 1:
        raise ConfigError(f"more than one environment: {', '.join(names)}; name one", code="two-environments")
    if config_name is not None:
        message = f"environment {names[0]!r} and --config-name {config_name} are two starting points: name one"
        raise ConfigError(message, code="two-starts")
    return names[0], overrides


def _not_an_override(argument: str) -> ConfigError:
    """An argument without `=`: a key without a value, or an unknown name."""
    key = argument.lstrip("+")
    if keys.is_group(key):
        message = f"{key} is a group of keys; give one of them a value: {keys.example_of(key)}=…"
        return ConfigError(message, key=key, code="no-value")
    if keys.is_key(key):
        return ConfigError(f"{key}: give a value: {key}=…", key=key, code="no-value")
    if "." in key:
        message = f"{key} has no value, and there is no such key{keys.suggest(key, None)}"
        return ConfigError(message, key=key, code="unknown-key")
    environments = _containing(argument, v1.ENVIRONMENTS)
    environments = environments or get_close_matches(argument.lower(), v1.ENVIRONMENTS, n=1, cutoff=0.6)
    recipes = [f"--config-name {name}" for name in _containing(argument, recipe_names())]
    near = " or ".join([*environments, *recipes])
    message = (
        f"{argument!r} is neither an environment nor key=value{f'; did you mean {near}?' if near else '.'} "
        f"Environments: {', '.join(v1.ENVIRONMENTS)}; choose a recipe with --config-name"
    )
    return ConfigError(message, key=argument, code="unknown-environment")


def _containing(part: str, names: Iterable[str]) -> list[str]:
    plain = part.lower().replace("_", "")
    return [name for name in names if len(plain) > 2 and plain in name.lower().replace("_", "")]


def read_overrides(overrides: Iterable[str], environment: str | None) -> list[Typed]:
    """The keys of the command line; of the same key twice, the last wins."""
    return _checked(overrides, _read_override, environment)


def read_variables(environ: Mapping[str, str], environment: str | None) -> list[Typed]:
    """`CONFIG_TRAINING__N_ROLLOUT=8` sets `training.n_rollout`, `CONFIG_RL_OR_SFT=sft` sets `rl_or_sft`."""
    return _checked(variable_names(environ), lambda name: _read_variable(name, environ[name]), environment)


def variable_names(environ: Mapping[str, str]) -> list[str]:
    """The variables that set keys: those named after a section of the v1 command line."""
    sections = {f"CONFIG_{key.partition('.')[0].upper()}__" for key in v1.KEYS if "." in key}
    return sorted(name for name in environ if name.startswith(tuple(sections)) or name == "CONFIG_RL_OR_SFT")


def _read_variable(name: str, text: str) -> Typed:
    key = name.removeprefix("CONFIG_").lower().replace("__", ".")
    try:
        return replace(_read_override(f"{key}={text}"), origin=f"variable {name}")
    except ConfigError as error:
        raise ConfigError(f"variable {name}: {error}", key=f"variable {name}", code=error.code) from error


def _read_override(override: str) -> Typed:
    """One override, parsed by Hydra. An empty value means null."""
    name, _, text = override.partition("=")
    key = name.strip().lstrip("+~")
    if not key:
        raise ConfigError(f"{override!r} names no key; write key=value, or ~key to reset a value", code="no-key")
    if not name.startswith("~"):
        if text == "":
            return Typed(key, None)
        if key in (devices.KEY, devices.V1_KEY):
            return Typed(key, text)  # `0,1` is a list here, not two values to try
    try:
        parsed = OverridesParser.create().parse_override(override)
    except (HydraException, ValueError) as error:  # a ValueError: a number with thousands of digits
        message = f"cannot read {shown(override)!r}; put quotes around special characters: {key}=\"'…'\""
        raise ConfigError(message, key=key, code="unreadable") from error
    if parsed.is_sweep_override():
        message = f"{shown(override)!r} holds several values: write a list as {key}=[…], text as {key}=\"'…'\""
        raise ConfigError(message, key=key, code="several-values")
    if parsed.package is not None:
        message = f"{shown(override)!r}: @{parsed.package} moves config groups, and there are none; leave it out"
        raise ConfigError(message, key=key, code="package")
    value = parsed.value()
    if isinstance(value, (bool, int, float)) and keys.takes_text(key):
        value = text.strip()
    return Typed(parsed.key_or_group, value, delete=parsed.is_delete())


def _checked(sources: Iterable[str], read: Callable[[str], Typed], environment: str | None) -> list[Typed]:
    """The keys of every source, in the order of their last mention. One error lists all problems."""
    last: dict[str, Typed] = {}
    problems: list[ConfigError] = []
    for source in sources:
        try:
            for item in _split_group(read(source)):
                keys.check_known(item.key, item.name, environment)
                if not item.delete:
                    item = replace(item, value=keys.checked(item.key, item.value, item.name))
                last.pop(item.key, None)
                last[item.key] = item
        except ConfigError as error:
            problems.append(error)
    raise_any(problems)
    return list(last.values())


def _split_group(item: Typed) -> Iterator[Typed]:
    """`lora={rank: 8}` is `lora.rank=8`: a group of keys is merged, not replaced, and `{}` changes nothing."""
    if not keys.is_group(item.key):
        yield item
    elif item.delete:
        is_v1 = item.key in keys.V1_GROUPS and item.key not in keys.TREE_GROUPS
        members = [key for key in v1.KEYS if key.startswith(f"{item.key}.")] if is_v1 else [item.key]
        yield from (replace(item, key=key) for key in members)
    elif isinstance(item.value, dict):
        for name, value in item.value.items():
            yield from _split_group(replace(item, key=f"{item.key}.{name}", value=value))
    elif item.value is None and keys.may_be_null(item.key):
        yield item
    else:
        raise refused(item.name, item.value, f"{GROUP}; name one: {keys.example_of(item.key)}=…", code="group")
