"""An experiment as it stands in its file: `plans/kl_sweep.yaml`, or one's own.

    load("kl_sweep").options["kl_values"].default       # "0,0.001,0.003,0.01,0.03,0.1"
    load("my/experiment.yaml")

Every scalar is text, as it was written. Names, paths and overrides are templates: `{kl}` is the value of a variable,
`{kl:label}` what follows from it (see `values.py`), `{config:seed.train}` a value of the resolved config. An override
whose value comes out empty is left out.

    script, about, examples   what --help says
    extends                   another file; this one's entries stand over its own, and its overrides come first
    start                     what `ragen train` gets first
    model, steps, cooldown    defaults of the common options; names: other names of these
    options                   options of its own: see `OptionSpec`
    values                    variables that are no options, in the same form
    derived                   variables that follow: {of: template, cases: {…}}, {product: template}, or
                              {share: template, of: config key}, a whole number of at least 1
    axes                      variables whose values are combined, the first one outermost
    groups                    or several grids: {"1": {heading, axes, set: {variable: value}, name}}
    search                    the groups of a search, see `search.py`
    series                    or other experiments in sequence: [{plan: name, option: value}]
    name, label, log, checkpoints, summary, project, num_gpus, title     templates; `all` takes all GPUs
    head                      the first lines of a run's log, below its title: templates
    checkpoint                what its runs begin from, see `probe.py`
    fields                    the first fields of a summary line: key=template; the value of `name` stands bare
    timings                   the fields after them
    reference                 the value that the others are compared with
    overrides                 what every run gets
    owned                     keys that the user's overrides may not change
    batch                     how many runs make a batch; without it, all do
    evaluate                  what follows the last run, {max_turns: [5, 25]}: see `evaluation.py`
    always_resume, wandb_mode, environment
"""

from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from ragen.errors import ConfigError, nearest_of
from ragen.experiment.values import counts

FOLDER = Path(__file__).parent / "plans"
TIMINGS = ["train_time", "eval_time", "total_time", "wall_time", "gpu", "status"]


@dataclass(frozen=True)
class OptionSpec:
    """An option, or a variable of the same form."""

    option: str  # without its dashes; `_` and `-` are the same
    variable: str
    kind: str = "text"  # see values.KINDS
    default: str | None = None
    is_list: bool = False  # a comma list
    is_flag: bool = False
    cases: dict[str, Any] = field(default_factory=dict)  # value -> {part: template, overrides: […]}; "*" for others
    aliases: dict[str, str] = field(default_factory=dict)  # `all` -> `filter,nofilter`
    names: tuple[str, ...] = ()  # other names of the option
    required: bool = False
    metavar: str | None = None
    help: str = ""

    @property
    def shown(self) -> str:
        return f"--{self.option}"


@dataclass(frozen=True)
class Spec:
    id: str
    source: str  # what `load` was asked for
    script: str = ""
    about: str = ""
    examples: list[str] = field(default_factory=list)
    start: list[str] = field(default_factory=list)
    model: str | None = None
    steps: str | None = None
    cooldown: str = "0"
    names: dict[str, list[str]] = field(default_factory=dict)
    options: dict[str, OptionSpec] = field(default_factory=dict)  # by variable
    values: dict[str, OptionSpec] = field(default_factory=dict)
    derived: dict[str, dict[str, Any]] = field(default_factory=dict)
    axes: list[str] = field(default_factory=list)
    groups: dict[str, dict[str, Any]] = field(default_factory=dict)
    search: dict[str, Any] = field(default_factory=dict)
    series: list[dict[str, str]] = field(default_factory=list)
    title: str = ""
    name: str = ""
    label: str = "{name}"
    log: str = ""
    checkpoints: str = ""
    summary: str = ""
    project: str = ""
    num_gpus: str = ""
    head: list[str] = field(default_factory=list)
    checkpoint: dict[str, str] = field(default_factory=dict)
    fields: list[str] = field(default_factory=list)
    timings: list[str] = field(default_factory=lambda: list(TIMINGS))
    reference: str | None = None
    overrides: list[str] = field(default_factory=list)
    owned: list[str] = field(default_factory=list)
    batch: str = ""
    evaluate: dict[str, Any] = field(default_factory=dict)  # max_turns: whole numbers
    always_resume: str = "False"
    wandb_mode: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


def names() -> list[str]:
    """The experiments that come with ragen."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


@cache
def load(name: str) -> Spec:
    path = _path(name)
    tree = _read(path)
    _check_shape(tree, path)
    for section in ("options", "values"):
        tree[section] = _options(tree.get(section, {}), f"{path}: {section}")
    tree["options"] |= _searched(tree.get("search", {}))
    tree["evaluate"] = _evaluate(tree.get("evaluate", {}), f"{path}: evaluate")
    return Spec(**{**tree, "id": path.stem, "source": name})


def _check_shape(tree: dict[str, Any], path: Path) -> None:
    """Entries that exist, of the right form, and all that a run needs."""
    empty = Spec(id="", source="")
    known = [spec.name for spec in fields(Spec) if spec.name not in ("id", "source")]
    for key, value in tree.items():
        if key not in known:
            raise ConfigError(f"{path}: unknown entry {key}{nearest_of(key, known)}")
        form = next((form for form in (list, dict) if isinstance(getattr(empty, key), form)), str)
        if not isinstance(value, form):
            words = {list: "a list", dict: "a group of entries", str: "text"}
            raise ConfigError(f"{path}: {key} takes {words[form]}, not {value!r}")
    if "series" in tree:
        return
    # Groups have names of their own.
    needed = ["start", "title", *([] if "groups" in tree else ["name"]), "log", "checkpoints", "summary", "project"]
    missing = [key for key in needed if not tree.get(key)]
    if missing:
        raise ConfigError(f"{path}: has no {' and no '.join(missing)}")


def _path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file")
        return Path(name)
    if name not in names():
        raise ConfigError(f"{name!r} is no experiment{nearest_of(name, names())}; or name a file: mine.yaml")
    return FOLDER / f"{name}.yaml"


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: an experiment is a group of entries, not {type(tree).__name__}")
    if "extends" not in tree:
        return tree
    name = tree.pop("extends")
    under = next((file for file in (path.parent / f"{name}.yaml", FOLDER / f"{name}.yaml") if file.is_file()), None)
    if under is None:
        raise ConfigError(f"{path}: extends {name}, but there is no {name}.yaml beside it")
    return _merged(_read(under), tree)


def _merged(under: dict[str, Any], over: dict[str, Any]) -> dict[str, Any]:
    merged = under | over
    for section in ("options", "values", "derived"):
        # Its own options come first: --help shows them in this order.
        merged[section] = over.get(section, {}) | {
            key: value for key, value in under.get(section, {}).items() if key not in over.get(section, {})
        }
    merged["overrides"] = [*under.get("overrides", []), *over.get("overrides", [])]
    return merged


def _options(section: dict[str, Any], where: str) -> dict[str, OptionSpec]:
    found = {}
    for option, entries in section.items():
        if not isinstance(entries, dict):
            raise ConfigError(f"{where}.{option}: takes a group of entries, not {entries!r}")
        entries = dict(entries)
        unknown = entries.keys() - {spec.name for spec in fields(OptionSpec)}
        if unknown:
            raise ConfigError(f"{where}.{option}: unknown entry {min(unknown)}")
        default = entries.get("default")
        if isinstance(default, list):
            entries |= {"default": ",".join(default), "is_list": True}
        for flag in ("is_flag", "required", "is_list"):
            entries[flag] = str(entries.get(flag, False)) == "True"
        entries["names"] = tuple(entries.get("names", ()))
        entries["aliases"] = dict(entries.get("aliases", {}))
        spec = OptionSpec(option=option, **({"variable": option.replace("-", "_")} | entries))
        found[spec.variable] = spec
    return found


def _evaluate(entries: dict[str, Any], where: str) -> dict[str, Any]:
    """Without entries, nothing is evaluated."""
    for key, listed in entries.items():
        if key != "max_turns":
            raise ConfigError(f"{where}: unknown entry {key}{nearest_of(key, ['max_turns'])}")
        if not isinstance(listed, list) or not listed or not all(isinstance(item, str) for item in listed):
            raise ConfigError(f"{where}.max_turns takes a list of numbers, such as [5, 25], not {listed!r}")
    return {key: counts(listed, f"{where}.{key}") for key, listed in entries.items()}


def _searched(search: dict[str, Any]) -> dict[str, OptionSpec]:
    """What a search varies can be fixed by an option of that name."""
    return {
        name: OptionSpec(name, name, entry["kind"], metavar="V", help=f"fixed value of what group {group} searches")
        for group, parameters in search.get("groups", {}).items()
        for name, entry in parameters.items()
    }
