"""Overrides after `--` must not contradict the labels of an experiment's runs.

    labels = labels_of(spec, {"kl": kl}, spec.overrides, variables)     # {"actor_rollout_ref.actor.kl_loss_coef": …, …}
    check(spec, texts, {start: labels}, ["actor_rollout_ref.actor.kl_loss_coef=0.5"])     # ConfigError

A run is named, filed and listed by its variables: those that are swept, fixed by a group, or part of its name, its
paths or its summary line. An override may not change a key that such a variable sets, however it is written: by its v1
name, with `+`, within a group of keys, as `~key`, by a key that it follows, or by one that follows it.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from string import Formatter
from typing import Any

from ragen.config import keys, v1
from ragen.config.overrides import Typed, read_overrides
from ragen.errors import ConfigError
from ragen.experiment import search
from ragen.experiment.spec import Spec
from ragen.experiment.template import Value, Variables, recipe_and_environment

COMMON_OPTIONS = ("model", "steps")  # variables that every experiment has


@dataclass(frozen=True)
class Label:
    """A key of the tree that a run's label speaks of, and the variable that sets it."""

    key: str  # as the experiment writes it
    variable: str


def labels_of(
    spec: Spec, swept: Mapping[str, Value], templates: Iterable[str], variables: Variables
) -> dict[str, Label]:
    """Tree key -> label, for one run. `templates` are the overrides of every run; swept values add theirs."""
    labelled = _labelled(spec, swept)
    found = [
        (variables.fill(key), variable)
        for template in templates
        for key, _, value in [template.partition("=")]
        for variable in sorted(_names_in(value) & labelled)
    ]
    found += [
        (variables.fill(template.partition("=")[0]), variable)
        for variable, value in swept.items()
        for template in value.overrides
    ]
    return {target: Label(key, variable) for key, variable in reversed(found) for target in _affected(key)}


def check(
    spec: Spec,
    texts: Mapping[str, str],
    labels: Mapping[tuple[str, ...], Mapping[str, Label]],
    overrides: Sequence[str],
) -> None:
    """Raise `ConfigError` for the first override that a label contradicts. `labels` are by start of the runs."""
    for start, of_start in labels.items():
        environment = next(iter(recipe_and_environment(start)[1]), None)
        for override in overrides:
            targets = {key for item in read_overrides([override], environment) for key in _set_by(item, environment)}
            for key, label in of_start.items():
                if any(f"{key}.".startswith(f"{target}.") for target in targets):
                    raise ConfigError(_message(spec, texts, label, override))


def _message(spec: Spec, texts: Mapping[str, str], label: Label, override: str) -> str:
    variable = label.variable
    flag = spec.options[variable].flag if variable in spec.options else f"--{variable}"
    ours, way_out = f"{flag} {texts.get(variable, '')}".strip(), f"use {flag}"
    if variable in search.grid(spec, texts):
        ours, way_out = f"--search_group {texts['search_group']}", f"it searches {variable}; remove the override"
    elif variable not in (*spec.options, *COMMON_OPTIONS):
        ours, way_out = f"the grid's {variable}", "remove the override"
    return f"{ours} and {override} (after --) both set {label.key}, which names and labels show: {way_out}"


def _labelled(spec: Spec, swept: Iterable[str]) -> set[str]:
    """The variables that tell runs apart or stand in their labels."""
    names = [group.name for group in spec.groups.values()] or [spec.name]
    shown = [*names, spec.label, spec.log, spec.checkpoints, spec.summary, *spec.fields]
    found = {name for template in shown for name in _names_in(template)}
    for variable in found & spec.derived.keys():
        found |= {name for text in _texts(spec.derived[variable]) for name in _names_in(text)}
    fixed = {name for group in spec.groups.values() for name in group.set}
    known = {*spec.options, *spec.values, *spec.derived, *COMMON_OPTIONS}
    return (found | fixed | set(swept)) & known


def _texts(rule: Any) -> list[str]:
    """Every text in the rule of a derived variable."""
    return [rule] if isinstance(rule, str) else [text for part in rule.values() for text in _texts(part)]


def _names_in(template: str) -> set[str]:
    return {name for _, name, _, _ in Formatter().parse(template) if name}


@cache
def _affected(key: str) -> frozenset[str]:
    """The tree keys that a key sets, and those that follow them."""
    targets = set(keys.targets(key)) if keys.is_key(key) else {key}
    return frozenset(targets.union(*map(keys.followed_by, targets)))


def _set_by(item: Typed, environment: str | None) -> frozenset[str]:
    """The tree keys that an override changes."""
    if item.key.startswith(v1.ENV_KWARGS):
        return frozenset(v1.translate(item.key, None, environment))
    return _affected(item.key)
