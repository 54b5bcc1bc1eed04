"""The variables of an experiment and the points of its grids.

texts, assumed = settings(spec, options)          # {"kl": "0,0.01", "include_zero": "True", …}
shared = common(spec, options, texts)             # what is the same in every run
for grid in grids(spec, shared, texts):
    grid.axes                                     # {"kl": [Value("0"), Value("0.01")]}
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ragen.errors import ConfigError, nearest_of
from ragen.experiment import search
from ragen.experiment.cell import Options
from ragen.experiment.spec import OptionSpec, Spec
from ragen.experiment.template import Scope
from ragen.experiment.values import Value, label, make, split


@dataclass(frozen=True)
class Grid:
    """Axes to combine, and what is fixed meanwhile."""

    group: str
    axes: dict[str, list[Value]]
    fixed: dict[str, Value]
    name: str
    heading: str = ""


def settings(spec: Spec, options: Options) -> tuple[dict[str, str], dict[str, str]]:
    """The experiment's own options as text, with defaults; and what a search had to assume."""
    given = dict(options.settings)
    for name in given:
        if name not in spec.options:
            raise ConfigError(f"{spec.id} has no option {name!r}{nearest_of(name, spec.options)}")
    if "model" in spec.options and options.model is not None:
        if "model" in given:
            raise ConfigError("--model and --models both name what to train: keep one of them")
        given["model"] = options.model
    for variable, option in spec.options.items():
        if option.required and variable not in given:
            raise ConfigError(f"{option.shown} is missing{_choices(option)}")
    if spec.search:
        found, assumed = search.fixed_values(spec, given, options)
        return {**_defaults(spec), **given, **found}, assumed
    return {**_defaults(spec), **given}, {}


def _defaults(spec: Spec) -> dict[str, str]:
    return {variable: option.default or "" for variable, option in spec.options.items()}


def _choices(option: OptionSpec) -> str:
    return f": one of {', '.join(case for case in option.cases if case != '*')}" if option.cases else ""


def common(spec: Spec, options: Options, texts: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are the same in every run."""
    budget = steps(spec, options)
    shared: dict[str, Any] = {
        "steps": "" if budget is None else str(budget),
        "ray_num_cpus": "" if options.ray_num_cpus is None else str(options.ray_num_cpus),
    }
    if "model" not in spec.options:
        shared["model"] = make("model", options.model or spec.model or "", "--model")
    searched = search.axes(spec, texts)
    for variable, option in spec.options.items():
        if variable not in spec.axes and variable not in searched and not option.is_list:
            shared[variable] = _value(option, texts[variable], shared)
    return shared


def steps(spec: Spec, options: Options) -> int | None:
    if options.steps is not None and options.steps < 1:
        raise ConfigError(f"--steps {options.steps}: must be at least 1")
    return options.steps if options.steps is not None else whole("steps", spec.steps) if spec.steps else None


def whole(entry: str, text: str) -> int:
    """A number that an experiment's file gives."""
    return int(make("count", text, f"{entry}:").text)


def _value(option: OptionSpec, text: str, known: Mapping[str, Any]) -> Value:
    """What an option's text stands for, with the parts that its case gives it."""
    if not text:
        return Value("")
    case = _case(option, text)
    try:
        value = make(option.kind, case or text, option.shown)
    except ConfigError:
        if case is None:
            raise
        value = Value(case, {"label": label(case)})  # a word beside the numbers: nofilter
    case = case or _case(option, value.text)
    if option.cases and case is None and "*" not in option.cases:
        raise ConfigError(f"{option.shown} {text}: unknown{_choices(option)}")
    parts = dict(option.cases.get(case or "*", {}))
    overrides = tuple(parts.pop("overrides", ()))
    scope = Scope({**known, "this": value}, {}, None)
    return replace(value, parts={**value.parts, **{k: scope.fill(v) for k, v in parts.items()}}, overrides=overrides)


def _case(option: OptionSpec, text: str) -> str | None:
    return next((case for case in option.cases if case != "*" and case.lower() == text.lower()), None)


def _values(option: OptionSpec, text: str, known: Mapping[str, Any]) -> list[Value]:
    items = split(text, option.shown)
    items = [part for item in items for part in option.aliases.get(item, item).split(",")]
    return [_value(option, item, known) for item in items]


def grids(spec: Spec, shared: Mapping[str, Any], texts: Mapping[str, str]) -> Iterator[Grid]:
    lists = {
        variable: _values(option, texts[variable] if variable in spec.options else option.default or "", shared)
        for variable, option in {**spec.options, **spec.values}.items()
        if option.is_list and variable != "skip_statuses"
    }
    scalars = fixed_values(spec, shared)
    if spec.search:
        group, parameters = str(shared["search_group"]), search.grid(spec, texts)
        axes = {name: [_value(spec.options[name], text, shared) for text in values] for name, values in parameters}
        yield Grid(group, axes, scalars, spec.name)
    elif spec.groups:
        for group in _wanted_groups(spec, lists["groups"]):
            entry = spec.groups[group]
            fixed = {name: _value(spec.values[name], text, shared) for name, text in entry["set"].items()}
            axes = {name: lists[name] for name in entry["axes"]}
            yield Grid(group, axes, scalars | fixed, entry["name"], entry["heading"])
    else:
        missing = [name for name in spec.axes if name not in lists]
        if missing:
            raise ConfigError(f"{spec.id}: the axis {missing[0]} is no variable with a list of values")
        yield Grid("", {name: lists[name] for name in spec.axes}, scalars, spec.name)


def fixed_values(spec: Spec, shared: Mapping[str, Any]) -> dict[str, Value]:
    """The variables of `values` that are no lists."""
    return {
        variable: _value(option, option.default or "", shared)
        for variable, option in spec.values.items()
        if not option.is_list
    }


def _wanted_groups(spec: Spec, wanted: Sequence[Value]) -> list[str]:
    """In the experiment's order, each once."""
    for value in wanted:
        if value.text not in spec.groups:
            raise ConfigError(f"--groups {value}: there is no such group; choose from {', '.join(spec.groups)}")
    chosen = {value.text for value in wanted}
    return [group for group in spec.groups if group in chosen]
