"""The values of an experiment, and how names, paths and overrides are made of them.

    kl = make("coefficient", "0.001", "--kl-values")
    "{kl}, {kl:label}, {kl:on}".format(kl=kl)          # "0.001, 0001, True"

A value keeps the text that was typed. What follows from it has a name of its own, which stands after the colon.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal

from ragen.coerce import WORDS
from ragen.errors import ConfigError, nearest_of, shown

NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d{1,3})?")
Parts = dict[str, str]


@dataclass(frozen=True)
class Value:
    text: str
    parts: Mapping[str, str] = field(default_factory=dict)  # what follows from it, by name
    overrides: tuple[str, ...] = ()  # what it sets besides

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
    return Value(text, {"label": label(text), **parts})


def label(text: str) -> str:
    """A value in the name of a folder: `0.001` is `0001`."""
    return text.replace(".", "").lower()


def split(text: str, where: str) -> list[str]:
    """The items of a comma list."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if not items:
        raise ConfigError(f"{where} {text!r}: the list is empty; write values with commas between them")
    return items


def counts(items: Sequence[str], where: str) -> tuple[int, ...]:
    """Whole numbers of at least 1, none of them twice."""
    found = tuple(int(make("count", item, where).text) for item in items)
    if len(set(found)) < len(found):
        raise ConfigError(f"{where} {','.join(items)}: a number is listed twice; keep one of them")
    return found


# --- kinds --------------------------------------------------------------------------------------------------------


def number(text: str, where: str) -> Decimal:
    if not NUMBER.fullmatch(text):
        raise ConfigError(f"{where} {shown(text)}: takes a number")
    return Decimal(text)


def _coefficient(text: str, where: str) -> tuple[str, Parts]:
    value = number(text, where)
    if value < 0:
        raise ConfigError(f"{where} {text}: must be 0 or more")
    return text, {"on": str(value != 0)}


def _positive(text: str, where: str) -> tuple[str, Parts]:
    if number(text, where) <= 0:
        raise ConfigError(f"{where} {text}: must be above 0")
    return text, {}


def _share(text: str, where: str) -> tuple[str, Parts]:
    if not 0 < number(text, where) <= 1:
        raise ConfigError(f"{where} {text}: must be above 0 and at most 1")
    return text, {}


def _whole(text: str, where: str) -> tuple[str, Parts]:
    if not re.fullmatch(r"-?\d{1,18}", text):
        raise ConfigError(f"{where} {shown(text)}: takes a whole number")
    return str(int(text)), {}


def _count(text: str, where: str) -> tuple[str, Parts]:
    text, parts = _whole(text, where)
    if int(text) < 1:
        raise ConfigError(f"{where} {text}: must be at least 1")
    return text, parts


def _bool(text: str, where: str) -> tuple[str, Parts]:
    words = {**WORDS, "1": True, "0": False}
    if text.lower() not in words:
        raise ConfigError(f"{where} {shown(text)}: takes True or False")
    return str(words[text.lower()]), {}


def _word(text: str, where: str) -> tuple[str, Parts]:
    """A part of names and paths."""
    if not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*", text):
        raise ConfigError(f"{where} {shown(text)!r}: takes letters, digits, and _ . + - after the first")
    return text, {}


def _model(text: str, where: str) -> tuple[str, Parts]:
    """A hub name, a folder, or `pocket`; a bare `Qwen…` is one of the hub's `Qwen/`.

    `name` is the last part, `full` all of it without slashes, `short` as in `sokoban_0_5B_instruct_ragen_main`,
    `size` as in `3B`.
    """
    name = text.rstrip("/").rpartition("/")[2]
    if not re.fullmatch(r"\w[\w.+-]*", name):
        raise ConfigError(f"{where} {shown(text)!r}: is no model; name one of the hub, a folder, or pocket")
    size = re.search(r"\d+(\.\d+)?B", name)
    short = re.sub(r"[.-]", "_", name.removeprefix("Qwen2.5-")).replace("_Instruct", "_instruct")
    return text, {
        "path": f"Qwen/{text}" if text.startswith("Qwen") and "/" not in text else text,
        "name": name,
        "full": text.strip("/").replace("/", "__"),
        "short": short,
        "size": size[0] if size else name,
    }


def _slip(text: str, where: str) -> tuple[str, Parts]:
    """How often the ice slips: `50` and `50%` are percent, `0.5` is a share. 1 alone could be either."""
    bare = text.removesuffix("%").strip()
    rate = number(bare, where)
    percent = text.endswith("%")
    if rate == 1 and not percent:
        raise ConfigError(f"{where} {text}: could be 1 % or 100 %; write 1% or 100")
    share = rate / 100 if percent or rate > 1 else rate
    if not 0 <= share <= 1:
        raise ConfigError(f"{where} {text}: must lie between 0 and 100 percent")
    ratio = _plain(share)
    return text, {"ratio": ratio, "label": f"slip{ratio.replace('.', 'p')}", "success": _plain(1 - share)}


def _plain(value: Decimal) -> str:
    """Without an exponent and without zeros at the end."""
    text = f"{value:f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


KINDS: dict[str, Callable[[str, str], tuple[str, Parts]]] = {
    "coefficient": _coefficient,
    "positive": _positive,
    "share": _share,
    "whole": _whole,
    "count": _count,
    "bool": _bool,
    "word": _word,
    "model": _model,
    "slip": _slip,
    "path": lambda text, where: (text, {}),  # relative ones are meant from where the user is
    "text": lambda text, where: (text, {}),
}


def same_value(text: str, other: str) -> bool:
    """0 and 0.0 are the same."""
    try:
        return number(text, "") == number(other, "")
    except ConfigError:
        return text == other
