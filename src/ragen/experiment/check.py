"""Every run of a plan, resolved before the first one starts.

    notes = check(plan)                    # ConfigError for a value that cannot work, naming the run
    check(plan, dry_run=True)              # resolves each value in at least one run, and accepts a missing checkpoint
    check_all(plans)                       # of a series; a dry run tries no value twice

What is evaluated afterwards has to be saved. Runs that are equal but for names, directories, devices and W&B are an
error where the experiment itself makes them equal, a note where the user's overrides do. Repetitions differ in their
seed only, so the first of each stands for all.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from ragen.config import identity_keys
from ragen.config.tree import to_dict, value_at
from ragen.errors import ConfigError
from ragen.experiment.expand import expand
from ragen.experiment.plan import CPU, Plan, overrides_on
from ragen.experiment.template import recipe_and_environment, same_value
from ragen.store.sweep_results import Cell


def check_all(plans: Iterable[Plan], dry_run: bool = False) -> list[str]:
    seen: set[str] = set()
    return list(dict.fromkeys(note for plan in plans for note in check(plan, dry_run, seen)))


def check(plan: Plan, dry_run: bool = False, seen: set[str] | None = None) -> list[str]:
    """Raise `ConfigError` if a run cannot work; returns notes. `seen`: overrides that a dry run has tried already."""
    if plan.missing and not dry_run:
        raise ConfigError(plan.missing)
    on_cpu = CPU in (plan.options.gpus or ())
    notes: dict[str, None] = {}
    same: dict[tuple, list[Cell]] = {}
    games: dict[str, Cell] = {}
    for cells in _to_resolve(plan, (set() if seen is None else seen) if dry_run else None):
        resolved = _resolved(cells[0], on_cpu)
        _check_names(cells[0], resolved.config, plan.built_on.get(cells[0].start, {}))
        if plan.options.evaluate_turns:
            notes |= dict.fromkeys(_about_evaluation(cells[0], resolved.config, games))
        notes |= dict.fromkeys(resolved.notes)
        if not on_cpu:
            notes |= dict.fromkeys(_about_memory(resolved.config))
        same.setdefault(_what_it_computes(resolved.config), []).extend(cells)
    equal = [cells for cells in same.values() if len(cells) > 1]
    return [*notes, *(_about_equal(cells, plan, on_cpu) for cells in equal)]


def _what_it_computes(config: Any) -> tuple:
    """The config without names, directories, devices and W&B: equal for equal runs."""
    values = identity_keys.identity_values(config, ignore=identity_keys.WHERE)
    return tuple((key, repr(value)) for key, value in sorted(values.items()))


def _distinctive(cell: Cell) -> tuple[str, ...]:
    """The overrides that make a run what it is."""
    keys = ((override.lstrip("+~").partition("=")[0], override) for override in cell.overrides)
    return (
        *cell.start,
        *(override for key, override in keys if identity_keys.changes_only(key) not in identity_keys.WHERE),
    )


def _to_resolve(plan: Plan, seen: set[str] | None) -> list[list[Cell]]:
    """Runs to resolve, each with those of the same overrides: all, or those with an override that was not `seen`."""
    first_seeds = {cell.setting: cell for cell in reversed(plan.cells)}
    alike: dict[tuple[str, ...], list[Cell]] = {}
    for cell in reversed(first_seeds.values()):
        alike.setdefault(_distinctive(cell), []).append(cell)
    if seen is None:
        return list(alike.values())
    chosen = []
    for overrides, cells in alike.items():
        if len(cells) > 1 or not seen.issuperset(overrides):
            chosen.append(cells)
        seen.update(overrides)
    return chosen


def _resolved(cell: Cell, on_cpu: bool) -> Any:
    from ragen.run.prepare import prepare

    recipe, environment = recipe_and_environment(cell.start)
    slot = (CPU,) if on_cpu else tuple(map(str, range(cell.num_gpus)))
    try:
        resolved = prepare([*environment, *overrides_on(cell, slot)], recipe)
    except ConfigError as error:
        raise ConfigError(f"{cell.name}: {error}") from error
    trainer = resolved.config.trainer
    for key, found, planned in (
        ("trainer.default_local_dir={checkpoints}", trainer.default_local_dir, str(cell.checkpoint_dir)),
        ("trainer.experiment_name={name}", trainer.experiment_name, cell.name),
        ("trainer.n_gpus_per_node={num_gpus}", trainer.n_gpus_per_node, cell.num_gpus),
    ):
        if found != planned:
            raise ConfigError(f"{cell.name} would have {found}, not {planned}: the experiment's overrides need {key}")
    return resolved


def _about_memory(config: Any) -> list[str]:
    """That a run does not fit on a GPU of this machine. The machine that it is placed on may have larger ones."""
    from ragen.run.nearest_fit import check_named

    try:
        check_named(config, _gpu_memory())
    except ConfigError as error:
        return [f"{error} (the run itself refuses to start on such a GPU)"]
    return []


@cache
def _gpu_memory() -> int | None:
    from ragen.machine import gpu_memory

    return gpu_memory()


def _check_names(cell: Cell, config: Any, built_on: Mapping[str, str]) -> None:
    """Names and counts were made before the config was resolved: a key that was set by another name shows here."""
    for key, text in built_on.items():
        if not same_value(str(value_at(config, key)), text):
            raise ConfigError(
                f"{cell.name} is built on {key}={text}, but its config has {value_at(config, key)}: write it as {key}=…"
            )


def _about_evaluation(cell: Cell, config: Any, games: dict[str, Cell]) -> list[str]:
    """`games` are those of the runs before, each with the first run that is validated in it."""
    if config.trainer.save_freq <= 0:
        raise ConfigError(
            f"{cell.name} saves no checkpoint that could be evaluated (trainer.save_freq={config.trainer.save_freq}): "
            "add `-- trainer.save_freq=N`, or skip the evaluation with --evaluate-turns none"
        )
    tags = dict.fromkeys(config.es_manager.val.env_configs.tags)
    games.setdefault(repr({tag: to_dict(config.custom_envs[tag]) for tag in tags}), cell)
    if len(games) == 1:
        return []
    first, second, *_ = games.values()
    return [
        f"{first.name} and {second.name} are validated in different games: the evaluation plays one for all, "
        "that of the first run which succeeds; --only chooses runs"
    ]


def _about_equal(cells: Sequence[Cell], plan: Plan, on_cpu: bool) -> str:
    names = ", ".join(cell.name for cell in cells)
    plain = list(cells)
    if plan.options.overrides:  # the same points of the experiment without what the user typed after --
        order = [cell.name for cell in plan.all_cells]
        unchanged = expand(plan.source, replace(plan.options, only=(), overrides=())).cells
        plain = [unchanged[order.index(cell.name)] for cell in cells]
    if len({_what_it_computes(_resolved(cell, on_cpu).config) for cell in plain}) < len(plain):
        raise ConfigError(f"{names} would be the same run under several names: keep one of them")
    return f"{names} are the same run under several names: {' '.join(plan.options.overrides)} makes them equal"
