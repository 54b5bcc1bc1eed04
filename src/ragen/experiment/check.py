"""Every run of a plan, resolved before the first one starts.

    notes = check(plan)                    # ConfigError for a value that cannot work, naming the run
    check(plan, can_train=True)            # also for what this version cannot train

Runs that would be equal but for names, folders, devices and W&B: an error where the experiment itself makes them equal,
a note where the user's overrides do. Repetitions differ in their seed only, so that the first of each stands for all.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ragen.experiment.cell import CPU, Cell, Plan, words
from ragen.experiment.plan import recipe_and_environment
from ragen.typed import ConfigError

IDENTITY = (
    "trainer.experiment_name",
    "trainer.project_name",
    "trainer.default_local_dir",
    "trainer.n_gpus_per_node",
    "trainer.logger",
    "system.CUDA_VISIBLE_DEVICES",
    "ray_kwargs.ray_init.num_cpus",
)


def check(plan: Plan, can_train: bool = False) -> list[str]:
    """Raise `ConfigError` if a run cannot work. Returns what is allowed and probably not meant."""
    on_cpu = plan.options.gpus is not None and CPU in plan.options.gpus
    notes: dict[str, None] = {}
    same: dict[tuple, list[Cell]] = {}
    for cell in (cell for cell in plan.cells if not cell.seed):
        resolved = _resolved(cell, on_cpu)
        if can_train:
            _check_supported(cell, resolved.config)
        notes |= dict.fromkeys(resolved.notes)
        same.setdefault(_essence(resolved.config), []).append(cell)
    equal = [cells for cells in same.values() if len(cells) > 1]
    return [*notes, *(_about_equal(cells, plan, on_cpu) for cells in equal)]


def _resolved(cell: Cell, on_cpu: bool) -> Any:
    from ragen.config.compose import resolve

    recipe, environment = recipe_and_environment(cell.start)
    slot = (CPU,) if on_cpu else tuple(map(str, range(cell.num_gpus)))
    try:
        resolved = resolve([*environment, *words(cell, slot)], recipe)
    except ConfigError as error:
        raise ConfigError(f"{cell.name}: {error}") from error
    folder = resolved.config.trainer.default_local_dir
    assert folder == str(cell.checkpoint_dir), f"{cell.name} writes to {folder}, not to {cell.checkpoint_dir}"
    return resolved


def _check_supported(cell: Cell, config: Any) -> None:
    from ragen.train import supported

    try:
        supported.check(config)
    except ConfigError as error:
        raise ConfigError(f"{cell.name}: {error}") from error


def _essence(config: Any) -> tuple:
    """All that makes a run what it is."""
    from ragen.config.tree import leaves

    values = {key: value for key, value in leaves(config).items() if key not in IDENTITY}
    return tuple((key, repr(value)) for key, value in sorted(values.items()))


def _about_equal(cells: Sequence[Cell], plan: Plan, on_cpu: bool) -> str:
    names = ", ".join(cell.name for cell in cells)
    bare = [replace(cell, overrides=_without(cell.overrides, plan.options.overrides)) for cell in cells]
    if len({_essence(_resolved(cell, on_cpu).config) for cell in bare}) < len(bare):
        raise ConfigError(f"{names} would be the same run under several names: keep one of them")
    return f"{names} are the same run under several names: {' '.join(plan.options.overrides)} makes them equal"


def _without(overrides: Sequence[str], typed: Sequence[str]) -> tuple[str, ...]:
    return tuple(word for word in overrides if word not in typed)
