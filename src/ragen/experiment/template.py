"""The values of an experiment's variables, and the templates of names, paths and overrides that they fill.

    kl = make("coefficient", "0.001", "--kl-values")
    "{kl}, {kl:label}, {kl:on}".format(kl=kl)                       # "0.001, 0001, True"
    variables = Variables({"kl": kl}, derived={}, config=None)
    variables.fill("sokoban_kl_sweep_{kl:label}")                   # "sokoban_kl_sweep_0001"
    variables.override("actor_rollout_ref.actor.kl_loss_coef={kl}") # "actor_rollout_ref.actor.kl_loss_coef=0.001"

A value keeps the text that was typed. Parts that follow from it have names, which stand after the colon. A derived
variable is computed on first use.
"""

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from math import prod
from typing import Any

import yaml

from ragen.coerce import WORDS
from ragen.config import quoting
from ragen.config.tree import value_at
from ragen.errors import ConfigError, nearest_of, shown

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
PLAIN = re.compile(r"[\w./:@+-]*")  # what Hydra's grammar takes without quotes
Parts = dict[str, str]


@dataclass(frozen=True)
class Value:
    text: str
    parts: Mapping[str, str] = field(default_factory=dict)  # by name
    overrides: tuple[str, ...] = ()  # templates of what it sets besides

    def __str__(self) -> str:
        return self.text

    def __format__(self, part: str) -> str:
        if not part:
            return self.text
        if part not in self.parts:
            raise ConfigError(f"{self.text} has no part {part!r}{nearest_of(part, self.parts)}")
        return self.parts[part]


def make(kind: str, text: str, where: str) -> Value:
    """The value that `text` stands for; `where` names the option in messages."""
    if kind not in KINDS:
        raise ConfigError(f"{where}: there is no kind {kind!r}{nearest_of(kind, KINDS)}")
    text, parts = KINDS[kind](text.strip(), where)
    return labelled(text, parts)


def labelled(text: str, parts: Mapping[str, str] | None = None) -> Value:
    """`label` is the value in the name of a directory: `0.001` is `0001`."""
    return Value(text, {"label": text.replace(".", "").lower(), **(parts or {})})


def split(text: str, where: str) -> list[str]:
    """The items of a comma list."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"{where} {text!r}: the list is empty; write values with commas between them")
    return items


def choose(text: str, known: Collection[str], where: str) -> str:
    """The text, which has to be a known one."""
    if text not in known:
        raise ConfigError(f"{where} {text}: unknown; choose from {', '.join(known)}")
    return text


def count(text: str, where: str) -> int:
    return int(make("count", text, where).text)


def counts(items: Sequence[str], where: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, none of them twice."""
    found = tuple(count(item, where) for item in items)
    if len(set(found)) < len(found):
        raise ConfigError(f"{where} {','.join(items)}: a number is listed twice; keep one of them")
    return found


def number(text: str, where: str) -> Decimal:
    if not NUMBER.fullmatch(text):
        raise ConfigError(f"{where} {shown(text)}: takes a number")
    return Decimal(text)


def same_value(text: str, other: str) -> bool:
    """0 and 0.0 are the same."""
    both_numbers = NUMBER.fullmatch(text) and NUMBER.fullmatch(other)
    return Decimal(text) == Decimal(other) if both_numbers else text == other


# --- kinds --------------------------------------------------------------------------------------------------------


def _checked(is_right: Callable[[Decimal], bool], rule: str) -> Callable[[str, str], tuple[str, Parts]]:
    """A number that follows a rule; its part `on` says whether it is not 0."""

    def kind(text: str, where: str) -> tuple[str, Parts]:
        value = number(text, where)
        if not is_right(value):
            raise ConfigError(f"{where} {text}: {rule}")
        return text, {"on": str(value != 0)}

    return kind


def _whole(text: str, where: str, least: int | None = None) -> tuple[str, Parts]:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise ConfigError(f"{where} {shown(text)}: takes a whole number")
    if least is not None and int(text) < least:
        raise ConfigError(f"{where} {text}: must be at least {least}")
    return str(int(text)), {}


def _bool(text: str, where: str) -> tuple[str, Parts]:
    known = {**WORDS, "1": True, "0": False}
    if text.lower() not in known:
        raise ConfigError(f"{where} {shown(text)}: takes True or False")
    return str(known[text.lower()]), {}


def _word(text: str, where: str) -> tuple[str, Parts]:
    """A part of names and paths."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", text):
        raise ConfigError(f"{where} {shown(text)!r}: takes letters, digits, and _ . + - after the first")
    return text, {}


def _model(text: str, where: str) -> tuple[str, Parts]:
    """A hub name, a directory, or `pocket`; a bare `Qwen…` is one of the hub's `Qwen/`."""
    name = text.rstrip("/").rpartition("/")[2]
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigError(f"{where} {shown(text)!r}: not a model; name one of the hub, a directory, or pocket")
    size = re.search(r"\d+(\.\d+)?B", name)
    return text, {
        "path": f"Qwen/{text}" if text.startswith("Qwen") and "/" not in text else text,
        "name": name,
        "full": text.strip("/").replace("/", "__"),
        # as in `sokoban_0_5B_instruct_ragen_main`
        "short": re.sub(r"[.-]", "_", name.removeprefix("Qwen2.5-")).replace("_Instruct", "_instruct"),
        "size": size[0] if size else name,
    }


def _slip(text: str, where: str) -> tuple[str, Parts]:
    """How often the ice slips: `50` and `50%` are percent, `0.5` is a share. 1 alone could be either."""
    is_percent = text.endswith("%")
    rate = number(text.removesuffix("%").strip(), where)
    if rate == 1 and not is_percent:
        raise ConfigError(f"{where} {text}: could be 1 % or 100 %; write 1% or 100")
    share = rate / 100 if is_percent or rate > 1 else rate
    if not 0 <= share <= 1:
        raise ConfigError(f"{where} {text}: must lie between 0 and 100 percent")
    ratio, success = (f"{value.normalize():f}" for value in (share, 1 - share))
    return text, {"ratio": ratio, "label": f"slip{ratio.replace('.', 'p')}", "success": success}


KINDS: dict[str, Callable[[str, str], tuple[str, Parts]]] = {
    "coefficient": _checked(lambda value: value >= 0, "must be 0 or more"),
    "positive": _checked(lambda value: value > 0, "must be above 0"),
    "share": _checked(lambda value: 0 < value <= 1, "must be above 0 and at most 1"),
    "whole": _whole,
    "count": partial(_whole, least=1),
    "bool": _bool,
    "word": _word,
    "model": _model,
    "slip": _slip,
    "path": lambda text, where: (text, {}),  # a relative one starts at the user's directory
    "text": lambda text, where: (text, {}),
}


# --- templates ----------------------------------------------------------------------------------------------------


class ConfigView:
    """`{config:seed.train}`: the value of a key in the runs of one start (`--config-name RECIPE`, or an environment).

    A run cannot be resolved while its overrides are being made, so a key is taken as it was typed, or else from the
    start alone. `read` keeps what was looked up, for comparison with the resolved runs.
    """

    def __init__(self, start: Sequence[str], typed: Mapping[str, str]):
        self._start, self._typed = start, typed
        self._config: Any = None
        self.read: dict[str, str] = {}

    def __format__(self, key: str) -> str:
        from ragen.config.compose import resolve

        if key in self._typed:
            value = yaml.safe_load(self._typed[key])
        else:
            recipe, environment = recipe_and_environment(self._start)
            self._config = self._config or resolve(environment, recipe, environ={}).config
            value = value_at(self._config, key)
        self.read[key] = str(value)
        return self.read[key]


def recipe_and_environment(start: Sequence[str]) -> tuple[str | None, list[str]]:
    """What `resolve` takes for a start."""
    return (start[1], []) if start[0] == "--config-name" else (None, list(start))


class Variables(dict[str, Any]):
    """The variables of a run, by name."""

    def __init__(self, values: Mapping[str, Any], derived: Mapping[str, dict[str, Any]], config: ConfigView | None):
        super().__init__(values)
        self._derived = derived
        self._open: list[str] = []  # being computed
        if config is not None:
            self["config"] = config

    def __missing__(self, name: str) -> Value:
        if name not in self._derived:
            raise ConfigError(f"there is no variable {name!r}{nearest_of(name, [*self, *self._derived])}")
        if name in self._open:
            raise ConfigError(f"the derived variables {' -> '.join([*self._open, name])} follow from one another")
        self._open.append(name)
        self[name] = labelled(self._derive(self._derived[name]))
        self._open.remove(name)
        return self[name]

    def _derive(self, rule: Mapping[str, Any]) -> str:
        if "product" in rule:
            return str(prod(number(part, "product") for part in self.fill(rule["product"]).split()))
        if "share" in rule:  # exact: 0.29 of 100 is 29
            whole = number(f"{self['config']:{rule['of']}}", rule["of"])
            return str(max(1, int(number(self.fill(rule["share"]), "share") * whole)))
        text, cases = self.fill(rule["of"]), rule["cases"]
        if text not in cases and "*" not in cases:
            raise ConfigError(f"{rule['of']} is {text!r}, for which there is no case: {', '.join(cases)}")
        return self.fill(cases[text] if text in cases else cases["*"])

    def fill(self, template: str) -> str:
        try:
            return template.format_map(self)
        except ConfigError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"template {template!r}: {error}") from error

    def override(self, template: str) -> str | None:
        """An override with its values, quoted where Hydra's grammar needs it; None where its value is empty."""
        key, _, value = self.fill(template).partition("=")
        if not value:
            return None
        if "{" in template and not PLAIN.fullmatch(value):
            value = quoting.quoted(value)
        return f"{key}={value}"
