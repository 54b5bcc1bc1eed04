"""What a user typed, word by word, and what the environment variables of the older dialect say.

    environment, words = split_environment(["sokoban", "training.n_rollout=8"], config_name=None)
    typed = read_words(words, environment)             # [Typed("training.n_rollout", 8)]

Hydra reads the override grammar. A group of keys is taken apart (`lora={rank: 8}` is `lora.rank=8`); afterwards every
name is known and every value has the type of its key.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException

from ragen.config import devices, keys, v1
from ragen.config.recipe import recipe_names
from ragen.errors import ConfigError, one_error, shown

COMMAND_LINE = "command line"
VARIABLE_SECTIONS = sorted({key.partition(".")[0] for key in v1.KEYS if "." in key})


@dataclass(frozen=True)
class Typed:
    """One key as the user set it. `~key` takes a value back; with a value, only if that is the present one."""

    key: str
    value: Any
    delete: bool = False
    origin: str = COMMAND_LINE  # or: variable CONFIG_…

    @property
    def name(self) -> str:
        """What the user knows the key by."""
        return self.key if self.origin == COMMAND_LINE else self.origin


def split_environment(arguments: list[str], config_name: str | None) -> tuple[str | None, list[str]]:
    """The environment's name, if one was given, and the overrides."""
    names = [word for word in arguments if "=" not in word and not word.startswith("~")]
    words = [word for word in arguments if word not in names]
    if not names:
        return None, words
    unknown = [_unknown_word(name) for name in names if name not in v1.ENVIRONMENTS]
    if unknown:
        raise one_error(unknown)
    if len(set(names)) > 1:
        raise ConfigError(f"more than one environment: {', '.join(names)}")
    if config_name is not None:
        raise ConfigError(f"environment {names[0]!r} and --config-name {config_name} are two starting points: name one")
    return names[0], words


def _unknown_word(word: str) -> str:
    """What is wrong with a word that has no `=`: a key without a value, or a name from elsewhere."""
    key = word.lstrip("+")
    if keys.is_group(key):
        return f"{key} is a group of keys; give one of them a value: {keys.example_of(key)}=…"
    if keys.is_key(key):
        return f"give a value: {key}=…"
    if "." in key:
        return f"{key} has no value, and there is no such key{keys.suggest(key, None)}"
    said = _plain(word)
    environments = [name for name in v1.ENVIRONMENTS if said and said in _plain(name)]
    environments = environments or get_close_matches(word.lower(), v1.ENVIRONMENTS, n=1, cutoff=0.6)
    recipes = [f"--config-name {name}" for name in recipe_names() if said and said in _plain(name)]
    near = " or ".join([*environments, *recipes])
    return (
        f"{word!r} is neither an environment nor key=value{f'; did you mean {near}?' if near else '.'} "
        f"Environments: {', '.join(v1.ENVIRONMENTS)}; a recipe is chosen with --config-name"
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def read_words(words: Iterable[str], environment: str | None) -> list[Typed]:
    """The command line's keys; the same key twice: the last wins."""
    return _checked(words, _read_word, environment)


def read_variables(environ: Mapping[str, str], environment: str | None) -> list[Typed]:
    """`CONFIG_TRAINING__N_ROLLOUT=8` sets `training.n_rollout`, `CONFIG_RL_OR_SFT=sft` sets `rl_or_sft`."""
    return _checked(variable_names(environ), lambda name: _read_variable(name, environ[name]), environment)


def variable_names(environ: Mapping[str, str]) -> list[str]:
    """The variables that are meant for this config: those with a section of the dialect in their name."""
    sections = tuple(f"CONFIG_{section.upper()}__" for section in VARIABLE_SECTIONS)
    return sorted(name for name in environ if name.startswith(sections) or name == "CONFIG_RL_OR_SFT")


def _read_variable(name: str, text: str) -> Typed:
    key = name.removeprefix("CONFIG_").lower().replace("__", ".")
    try:
        return replace(_read_word(f"{key}={text}"), origin=f"variable {name}")
    except ConfigError as error:
        raise ConfigError(f"variable {name}: {error}") from error


def _read_word(word: str) -> Typed:
    """One word, read with Hydra's grammar. An empty value means null."""
    name, _, text = word.partition("=")
    key = name.strip().lstrip("+~")
    if not key:
        raise ConfigError(f"{word!r} names no key; write key=value, or ~key to take a value back")
    if not name.startswith("~"):
        if text == "":
            return Typed(key, None)
        if key in (devices.KEY, devices.V1_KEY):
            return Typed(key, text)  # `0,1` is a list here, not two values to try
    override = _parse(word, key)
    value = override.value()
    if isinstance(value, (bool, int, float)) and keys.takes_text(key):
        value = text.strip()
    return Typed(override.key_or_group, value, delete=override.is_delete())


def _parse(word: str, key: str) -> Override:
    try:
        override = OverridesParser.create().parse_override(word)
    except (HydraException, ValueError) as error:  # a ValueError: a number with thousands of digits
        raise ConfigError(
            f"cannot read {shown(word)!r}; put quotes around special characters: {key}=\"'…'\""
        ) from error
    if override.is_sweep_override():
        raise ConfigError(f"{shown(word)!r} holds several values: a list is written {key}=[…], text {key}=\"'…'\"")
    if override.package is not None:
        raise ConfigError(f"{shown(word)!r}: @{override.package} moves config groups, and there are none; leave it out")
    return override


def _checked(words: Iterable[str], read: Callable[[str], Typed], environment: str | None) -> list[Typed]:
    """Every word as its keys. What is wrong with any of them comes in one error."""
    last: dict[str, Typed] = {}
    problems = []
    for word in words:
        try:
            for item in _take_apart(read(word)):
                keys.check_known(item.key, item.name, environment)
                if not item.delete:
                    item = replace(item, value=keys.checked(item.key, item.value, item.name))
                last.pop(item.key, None)  # so that the order is that of the last mention
                last[item.key] = item
        except ConfigError as error:
            problems.append(str(error))
    if problems:
        raise one_error(list(dict.fromkeys(problems)))
    return list(last.values())


def _take_apart(item: Typed) -> Iterator[Typed]:
    """`lora={rank: 8}` is `lora.rank=8`: a group of keys is merged, not replaced, and `{}` changes nothing."""
    if not keys.is_group(item.key):
        yield item
    elif item.delete:
        is_dialect = item.key in keys.V1_GROUPS and item.key not in keys.TREE_GROUPS
        members = [key for key in v1.KEYS if key.startswith(f"{item.key}.")]
        yield from (replace(item, key=key) for key in members) if is_dialect else [item]
    elif isinstance(item.value, dict):
        for name, value in item.value.items():
            yield from _take_apart(replace(item, key=f"{item.key}.{name}", value=value))
    elif item.value is None and keys.may_be_null(item.key):
        yield item
    else:
        raise ConfigError(
            f"{item.name}={shown(item.value)}: this is a group of keys, not a value; name one: "
            f"{keys.example_of(item.key)}=…"
        )
