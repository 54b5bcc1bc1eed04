"""An experiment as its YAML file describes it: `plans/kl_sweep.yaml`, or a file of the user's.

    load("kl_sweep").options["kl"].default              # "0,0.001,0.003,0.01,0.03,0.1"
    load("my/experiment.yaml")

Every scalar is text, as it was written. Names, paths and overrides are templates: `{kl}` is the value of a variable,
`{kl:label}` a part of it (see `template.py`), `{config:seed.train}` a value of the resolved config. An override whose
value comes out empty is dropped. A file may extend another one: `extends: kl_sweep`. Its entries then replace those of
the other file, except that options, values and derived variables are merged and its overrides follow the other's.
"""

from functools import cache
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, Field, NonNegativeFloat, PositiveInt, ValidationError, field_validator, model_validator

from ragen.errors import ConfigError, did_you_mean, nearest_of, shown

FOLDER = Path(__file__).parent / "plans"
TIMINGS = ["train_time", "eval_time", "total_time", "wall_time", "gpu", "status"]
NEEDED = ("start", "title", "log", "checkpoints", "summary", "project")


class Entry(BaseModel):
    """A part of the file. Unknown names are errors."""

    model_config = {"extra": "forbid", "frozen": True}


class OptionSpec(Entry):
    """A command-line option of the experiment, or a variable of the same form."""

    option: str  # without its dashes; `_` and `-` are the same
    variable: str
    kind: str = "text"  # see template.KINDS
    default: str | None = None  # a list in the file makes it a comma list
    is_list: bool = False
    is_flag: bool = False
    cases: dict[str, dict[str, Any]] = {}  # value -> {part: template, overrides: […]}; "*" for all other values
    aliases: dict[str, str] = {}  # `all` -> `filter,nofilter`
    names: tuple[str, ...] = ()  # other names of the option
    required: bool = False
    metavar: str | None = None
    help: str = ""

    @model_validator(mode="before")
    @classmethod
    def _join_list(cls, entries: Any) -> Any:
        if isinstance(entries, dict) and isinstance(entries.get("default"), list):
            return entries | {"default": ",".join(entries["default"]), "is_list": True}
        return entries

    @property
    def flag(self) -> str:
        return f"--{self.option}"

    @property
    def choices(self) -> list[str]:
        return [case for case in self.cases if case != "*"]


class Group(Entry):
    """One of several grids."""

    heading: str
    axes: list[str]
    set: dict[str, str]  # variables that are fixed in it
    name: str


class Searched(Entry):
    """A parameter of a search."""

    kind: str
    values: list[str]
    later: str  # what earlier groups take for it, and a dry run of a later group


class Search(Entry):
    """See `search.py`."""

    carried: str = ""  # the file with the best values of a group
    groups: dict[str, dict[str, Searched]] = {}


class Checkpoint(Entry):
    """What the runs begin from, see `probed_checkpoint.py`. Templates."""

    runs: str  # the directory of the runs
    like: str  # the pattern of their names
    usual: str  # the name to show if there is none
    made_by: str  # the command that makes one


class Evaluate(Entry):
    max_turns: tuple[PositiveInt, ...] = Field(default=(), min_length=1)

    @field_validator("max_turns")
    @classmethod
    def _check_once(cls, listed: tuple[int, ...]) -> tuple[int, ...]:
        if len(set(listed)) < len(listed):
            raise ValueError(f"evaluate.max_turns={list(listed)}: a number is listed twice")
        return listed


class Spec(Entry):
    id: str
    source: str  # what `load` was asked for
    # for --help
    script: str = ""
    about: str = ""
    examples: list[str] = []
    # the command line
    start: list[str] = []  # what `ragen train` gets first
    model: str | None = None  # defaults of the common options
    steps: PositiveInt | None = None
    cooldown: NonNegativeFloat = 0.0
    names: dict[str, list[str]] = {}  # other names of the common options
    options: dict[str, OptionSpec] = {}  # by variable
    # variables and grids
    values: dict[str, OptionSpec] = {}  # variables that are not options
    derived: dict[str, dict[str, Any]] = {}  # {of: template, cases: …}, {product: template} or {share: …, of: key}
    axes: list[str] = []  # variables whose values are combined, the first one outermost
    groups: dict[str, Group] = {}  # or several grids
    search: Search = Search()  # or the groups of a search
    series: list[dict[str, str]] = []  # or other experiments in sequence: [{plan: name, option: value}]
    # templates of a run
    title: str = ""
    name: str = ""
    label: str = "{name}"
    log: str = ""
    checkpoints: str = ""
    summary: str = ""
    project: str = ""
    num_gpus: str = ""  # `all` takes all GPUs
    head: list[str] = []  # the first lines of a run's log, below its title
    overrides: list[str] = []
    # the rest
    checkpoint: Checkpoint | None = None
    fields: list[str] = []  # the first fields of a summary line: key=template; the value of `name` stands bare
    timings: list[str] = TIMINGS  # the fields after them
    reference: str | None = None  # the value that the others are compared with
    owned: list[str] = []  # keys that the user's overrides may not change
    batch: str = ""  # template: the number of runs in a batch; without it, all runs are one batch
    evaluate: Evaluate = Evaluate()  # what follows the last run, see `evaluation.py`
    always_resume: bool = False
    wandb_mode: str | None = None
    environment: dict[str, str] = {}

    @model_validator(mode="after")
    def _check_needed(self) -> "Spec":
        needed = () if self.series else NEEDED if self.groups else (*NEEDED, "name")
        missing = [key for key in needed if not getattr(self, key)]
        if missing:
            raise ValueError(f"has no {' and no '.join(missing)}")
        return self


KNOWN = [name for model in Entry.__subclasses__() for name in model.model_fields]


def names() -> list[str]:
    """The experiments that come with ragen."""
    return sorted(path.stem for path in FOLDER.glob("[!_]*.yaml"))


@cache
def load(name: str) -> Spec:
    path = _path(name)
    tree = _read(path)
    for section in ("options", "values"):
        tree[section] = dict(_named(option, entries) for option, entries in tree.get(section, {}).items())
    try:
        spec = Spec(**{**tree, "id": path.stem, "source": name})
    except ValidationError as error:
        raise ConfigError(f"{path}: {_problem(error.errors()[0])}") from None
    return spec.model_copy(update={"options": spec.options | _searched(spec)}) if spec.search.groups else spec


def _path(name: str) -> Path:
    if name.endswith((".yaml", ".yml")):
        if not Path(name).is_file():
            raise ConfigError(f"{name}: no such file")
        return Path(name)
    if name not in names():
        raise ConfigError(f"there is no experiment {name!r}{nearest_of(name, names())}; or name a file: mine.yaml")
    return FOLDER / f"{name}.yaml"


def _read(path: Path) -> dict[str, Any]:
    try:
        tree = yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: {' '.join(str(error).split())}") from error
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: an experiment is a group of entries, not {type(tree).__name__}")
    for section in ("options", "values", "derived"):
        if not isinstance(tree.get(section, {}), dict):
            raise ConfigError(f"{path}: {section} takes a group of entries, not {tree[section]!r}")
    if "extends" not in tree:
        return tree
    name = tree.pop("extends")
    base = next((file for file in (path.parent / f"{name}.yaml", FOLDER / f"{name}.yaml") if file.is_file()), None)
    if base is None:
        raise ConfigError(f"{path}: extends {name}, but there is no {name}.yaml beside it")
    return _merged(_read(base), tree)


def _merged(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    sections = {
        # Its own options come first: --help shows them in this order.
        section: {**tree.get(section, {}), **base.get(section, {}), **tree.get(section, {})}
        for section in ("options", "values", "derived")
    }
    return {**base, **tree, **sections, "overrides": [*base.get("overrides", []), *tree.get("overrides", [])]}


def _named(option: str, entries: Any) -> tuple[str, Any]:
    if not isinstance(entries, dict):
        return option, entries
    entries = {"option": option, "variable": option.replace("-", "_"), **entries}
    return entries["variable"], entries


def _problem(error: Any) -> str:
    """The message for an error of pydantic."""
    *parents, name = map(str, error["loc"] or ("",))
    if error["type"] == "extra_forbidden":
        return f"{'.'.join(parents)}{': ' if parents else ''}unknown entry {name}{did_you_mean(name, KNOWN)}"
    if error["type"] == "value_error":
        return error["msg"].removeprefix("Value error, ")
    return f"{'.'.join([*parents, name])}={shown(error['input'])}: {error['msg'][0].lower()}{error['msg'][1:]}"


def _searched(spec: Spec) -> dict[str, OptionSpec]:
    """An option of its name fixes the value of what another group searches."""
    found = {}
    for group, parameters in spec.search.groups.items():
        about = f"fixed value of what group {group} searches"
        for name, one in parameters.items():
            found[name] = OptionSpec(option=name, variable=name, kind=one.kind, metavar="V", help=about)
    return found
