"""The tables of keys in docs/coming-from-verl.md: every key with its default, and how it compares with theirs.

    PYTHONPATH=src .venv/bin/python scripts/docs/keys.py             # writes them into the page
    PYTHONPATH=src .venv/bin/python scripts/docs/keys.py --check     # exit status 1 if the page is not up to date

Generated from the schema (defaults, keys without effect), the published defaults and the keys of features not built yet
(tests/data), and docs/architecture.md, which says why a default departs. Text outside the two marks stays.
"""

import argparse
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, get_args

import yaml

from ragen.config import keys, v1
from ragen.config.compose import resolve
from ragen.config.schema import Config
from ragen.config.tree import leaves, schema_fields
from ragen.env.base import Tag
from ragen.env.registry import catalogue

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/coming-from-verl.md"
BEGIN, END = "<!-- keys: begin -->", "<!-- keys: end -->"
SAME = "same"
UNPUBLISHED = "–"


def page(text: str) -> str:
    """The page with regenerated tables."""
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise ValueError(f"{PAGE} must hold {BEGIN} and, after it, {END}")
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


def tables() -> str:
    parts = ["### The tree", ""]
    for title, rows in tree_rows().items():
        parts += [f"#### {title}", "", "| Key | Default | |", "|---|---|---|", *rows, ""]
    parts += ["### The v1 command line", "", "| Key | Default | Here |", "|---|---|---|", *v1_rows(), ""]
    return "\n".join(parts)


# --- the tree -----------------------------------------------------------------------------------------------------


def tree_rows() -> dict[str, list[str]]:
    """Rows by section of the tree; single keys come first."""
    defaults = leaves(resolve([], "base", environ={}).config)
    sections: dict[str, list[str]] = {"single keys": []}
    for key, spec, _ in schema_fields(Config):
        if key == "custom_envs":
            sections["custom_envs"] = list(tag_rows())
            continue
        value = defaults.get(key, spec.default)
        if key == "ray_kwargs.ray_init":
            key, value = "ray_kwargs.ray_init.num_cpus", defaults["ray_kwargs.ray_init.num_cpus"]
        section = _section(key)
        sections.setdefault(section, []).append(_row(key, value, status(key, value)))
    return sections


def _section(key: str) -> str:
    parts = key.split(".")
    if len(parts) == 1:
        return "single keys"
    return ".".join(parts[:2]) if parts[0] == "actor_rollout_ref" else parts[0]


def tag_rows() -> Iterator[str]:
    for key, spec, _ in schema_fields(Tag):
        reason = spec.metadata.get("no_effect")
        listed = any(re.fullmatch(rf"custom_envs\.\w+\.{key}(\..*)?", name) for name in _published())
        words = f"no effect: {reason}" if reason else SAME if listed else UNPUBLISHED
        yield _row(f"custom_envs.<Tag>.{key}", leaves(Tag())[key], words)
    yield f"| tags | | {', '.join(f'`{name}`' for name in catalogue())} |"


def status(key: str, value: Any) -> str:
    """How a key compares with the published one."""
    if reason := keys.no_effect(key):
        return f"no effect: {reason}"
    if feature := _features().get(key.removesuffix(".num_cpus")):
        return f"not yet: {feature}"
    published = _published()
    if key not in published:
        return UNPUBLISHED
    if published[key] == value:
        return SAME
    return f"**changed** from {_code(published[key])}: {_reasons()[key]}"


@cache
def _published() -> dict[str, Any]:
    """The published defaults of the recipes, and those of v1 under `sft`."""
    tables = yaml.safe_load((ROOT / "tests/data/published_defaults.yaml").read_text(encoding="utf-8"))
    return {key: value for key, value in tables["v1"].items() if key.startswith("sft.")} | tables["base"]


@cache
def _features() -> dict[str, str]:
    features = yaml.safe_load((ROOT / "tests/data/not_built_yet.yaml").read_text(encoding="utf-8"))
    return {key: feature.partition(":")[0] for feature, listed in features.items() for key in listed}


@cache
def _reasons() -> dict[str, str]:
    """Why a default departs from the published one."""
    text = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    table = text.partition("## Where the tree departs")[2]
    return dict(re.findall(r"^\| `([^`]+)` \| [^|]* \| [^|]* \| ([^|]*) \|$", table, re.MULTILINE))


# --- the v1 command line ------------------------------------------------------------------------------------------


def v1_rows() -> Iterator[str]:
    """The v1 keys, except those that the tree has with the same default."""
    tree, follows = leaves(resolve([], "base", environ={}).config), _followers()
    for key, spec in v1.KEYS.items():
        if spec.targets == (key,) and tree[key] == spec.default:
            continue
        yield _row(key, spec.default, _meaning(key, spec, follows))
    yield "| `env.name` | the first argument | no effect: the first argument names the environment |"
    yield "| `env.env_kwargs.<setting>` | | `custom_envs.<Tag>.env_config.<setting>` of the environment's tag |"


def _meaning(key: str, spec: v1.Key, follows: dict[str, str]) -> str:
    if reason := keys.no_effect(key):
        return f"no effect: {reason}"
    if spec.targets == (key,):
        return "the same key, with another default"
    return follows[key] if key in follows else ", ".join(f"`{target}`" for target in spec.targets) + _turned(spec)


def _turned(spec: v1.Key) -> str:
    """How a value is converted for the tree."""
    if spec.type is bool and spec.value(True) is False:
        return ", inverted"
    if type(None) in get_args(spec.type) and not spec.null_is_unset and spec.value(None) is not None:
        return f"; null means {spec.value(None)}"
    return ""


def _followers() -> dict[str, str]:
    """Keys without a target in the tree -> what follows from them."""
    config = resolve(["model_path=none"], environ={}).config
    found: dict[str, str] = {}
    for target, derived in v1.derived(v1.Known("sokoban", {}, config, ())).items():
        for source in derived.sources:
            if not v1.KEYS[source].targets and not keys.no_effect(target):
                found[source] = f"`{target}`, computed: {derived.why}"
    return found


# --- cells --------------------------------------------------------------------------------------------------------


def _row(key: str, value: Any, words: str) -> str:
    return f"| `{key}` | {_code(value)} | {words.replace('|', chr(92) + '|')} |"


def _code(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**9).removesuffix("\n").removesuffix("\n...")
    return f"`{text.replace('|', chr(92) + '|')}`"


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the tables of keys into docs/coming-from-verl.md.")
    parser.add_argument("--check", action="store_true", help="only say whether they are up to date")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = page(before)
    if options.check:
        if before != after:
            print(f"{PAGE.relative_to(ROOT)} is not up to date: run scripts/docs/keys.py", file=sys.stderr)
        return int(before != after)
    PAGE.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
