"""From an experiment and what was asked of it to the ordered list of its runs.

    expand("kl_sweep", Options(settings=(("kl", "0,0.01"),))).cells[0].name     # sokoban_kl_sweep_nofilter_0-Qwen2.5-3B
    plans("all_kl_entropy", Options())                                          # three plans, to be run in sequence

Nothing is resolved here beyond what a name needs; `check.py` resolves every run.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

from ragen.errors import ConfigError, did_you_mean
from ragen.experiment import probe, slots
from ragen.experiment.cell import CPU, Cell, Options, Plan
from ragen.experiment.grids import Grid, common, fixed_values, grids, settings, steps, whole
from ragen.experiment.spec import Spec, load
from ragen.experiment.template import ConfigView, Scope
from ragen.experiment.values import KINDS, Value, number, same_value, split

ALL = "all"  # as a number of GPUs: those that are listed
NONE = "none"  # of the statuses to skip
SEED_STRIDE = 1_000_000  # between the training seeds of two repetitions: no level is in both
EXPERIMENT_OWNS = {
    "trainer.experiment_name": "the names of an experiment's runs are its own",
    "model.experiment_name": "the names of an experiment's runs are its own",
    "trainer.default_local_dir": "the folders of an experiment's runs are its own",
    "model_path": "say --model",
    "model.base_model": "say --model",
    "trainer.total_training_steps": "say --steps",
    "training.total_training_steps": "say --steps",
    "trainer.n_gpus_per_node": "say --gpus-per-exp",
    "system.n_gpus": "say --gpus-per-exp",
    "system.CUDA_VISIBLE_DEVICES": "say --gpus",
    "system.cuda_visible_devices": "say --gpus",
}


def plans(name: str, options: Options) -> tuple[Plan, ...]:
    """The plans of an experiment, to be run in this order."""
    spec = load(name)
    if not spec.series:
        return (expand(name, options),)
    parts = [(load(entry["plan"]), _with_settings(options, entry)) for entry in spec.series]
    whole = [plan for plan in (_expand(*part) for part in parts) if plan.cells]
    if not whole:
        raise _no_such_run(options.only, [cell for part in parts for cell in _all_cells(*part)])
    return tuple(whole)


def _with_settings(options: Options, entry: Mapping[str, str]) -> Options:
    spec = load(entry["plan"])
    fixed = [(variable, entry[option.option]) for variable, option in spec.options.items() if option.option in entry]
    taken = [name for name, _ in options.settings if name in dict(fixed)]
    if taken:
        raise ConfigError(f"--{taken[0]}: this experiment goes through all of them; leave it out")
    return replace(options, settings=(*options.settings, *fixed))


def expand(name: str, options: Options) -> Plan:
    """The plan of one experiment. Raises `ConfigError` for a value, a list or a set of GPUs that cannot work."""
    spec = load(name)
    if spec.series:
        raise ConfigError(f"{name} is several experiments in sequence: see `plans`")
    plan = _expand(spec, options)
    if not plan.cells:
        raise _no_such_run(options.only, _all_cells(spec, options))
    return plan


def _with_devices(spec: Spec, options: Options) -> Options:
    """A run that takes all devices has to know them before it has a name."""
    if spec.num_gpus != ALL or options.gpus is not None:
        return options
    if options.ray_address:
        raise ConfigError("--ray-address: this experiment takes all GPUs for one run; say which with --gpus LIST")
    return replace(options, gpus=slots.discover())


def _notes(begins_from: probe.Found | None, options: Options) -> tuple[str, ...]:
    if begins_from is None:
        return ()
    idle = [f"--steps {options.steps} has no effect: nothing is trained"] if options.steps is not None else []
    return (*idle, *([] if begins_from.missing else [f"checkpoint: {begins_from.value}"]))


def _all_cells(spec: Spec, options: Options) -> tuple[Cell, ...]:
    return _expand(spec, replace(options, only=())).cells


def _expand(spec: Spec, options: Options) -> Plan:
    _check_overrides(spec, options.overrides)
    options = _with_devices(spec, options)
    texts, assumed = settings(spec, options)
    shared = common(spec, options, texts)
    views = Views(spec, shared, options)
    begins_from = probe.find(spec, shared, Scope(shared, spec.derived, views.of(tuple(spec.start))))
    if begins_from is not None:
        shared["checkpoint"] = begins_from.value
    cells, headings = [], {}
    for grid in grids(spec, shared, texts):
        headings[grid.group] = grid.heading
        for values in product(*grid.axes.values()):
            point = dict(zip(grid.axes, values, strict=True))
            cells += _cells(spec, options, grid, shared | grid.fixed | point, list(point), views)
    _check_labels(cells)
    reference = _reference(spec, cells)
    kept = [cell for cell, _ in cells if _is_wanted(cell, options.only)]
    options = _filled(spec, options, shared, kept)
    scope = Scope(shared | fixed_values(spec, shared), spec.derived, views.of(cells[0][0].start))
    return Plan(
        name=spec.id,
        title=scope.fill(spec.title),
        header=_header(spec, texts, options),
        cells=tuple(kept),
        batches=_batches(kept, whole("batch", scope.fill(spec.batch)) if spec.batch else None),
        summary_path=Path(scope.fill(spec.summary)),
        summary_fields=(
            *(entry.partition("=")[0] for entry in spec.fields),
            *spec.timings,
            *(["seed"] if options.seeds else []),
        ),
        options=options,
        source=spec.source,
        reference=reference,
        headings={group: heading for group, heading in headings.items() if heading},
        append_summary=spec.always_resume == "True",
        wandb_mode=spec.wandb_mode,
        sync_wandb=spec.wandb_mode == "offline",
        train_environment=dict(spec.environment),
        assumed=assumed,
        built_on=views.read(),
        notes=_notes(begins_from, options),
        missing=begins_from.missing if begins_from is not None else "",
    )


# --- runs ---------------------------------------------------------------------------------------------------------


def _cells(
    spec: Spec, options: Options, grid: Grid, values: Mapping[str, Any], axes: Sequence[str], views: "Views"
) -> list[tuple[Cell, tuple[str, ...]]]:
    """The runs of one point, one for each seed, with the texts of their axes."""
    texts = tuple(values[name].text for name in axes)
    joined = "_".join(f"{name}_{text}" for name, text in zip(axes, texts, strict=True))
    values = {**values, "axes": joined}
    view = views.of(tuple(Scope(values, spec.derived, None).fill(word) for word in spec.start))
    scope = Scope(values, spec.derived, view)
    name = scope.fill(grid.name)
    scope["name"] = name
    point = scope.fill(spec.label)
    found = []
    for seed in _seeds(options):
        end = "" if seed is None else f"-s{seed}"
        scope = Scope({**values, "name": name + end}, spec.derived, view)
        found.append((_cell(spec, options, grid.group, scope, point + end, seed, [values[a] for a in axes]), texts))
    return found


def _seeds(options: Options) -> Sequence[int | None]:
    if options.seeds is not None and options.seeds < 1:
        raise ConfigError(f"--seeds {options.seeds}: must be at least 1")
    return [None] if options.seeds is None else range(options.seeds)


def _cell(
    spec: Spec, options: Options, group: str, scope: Scope, point: str, seed: int | None, axes: Sequence[Value]
) -> Cell:
    num_gpus = _num_gpus(spec, options, scope)
    scope["num_gpus"], scope["project"] = str(num_gpus), scope.fill(spec.project)
    scope["gpus"] = "auto" if options.gpus is None else ",".join(options.gpus)
    scope["checkpoints"] = scope.fill(spec.checkpoints)
    log = Path(scope.fill(spec.log))
    fields = [(name, scope.fill(template)) for name, _, template in (entry.partition("=") for entry in spec.fields)]
    templates = [*spec.overrides, *(word for value in axes for word in value.overrides)]
    words = _below([scope.word(template) for template in templates], options.overrides)
    return Cell(
        name=scope["name"],
        label=point,
        group=group,
        start=tuple(scope.fill(word) for word in spec.start),
        overrides=(*words, *options.overrides, *_seed_words(seed, scope)),
        num_gpus=num_gpus,
        seed=seed,
        log_path=log,
        result_path=log.with_suffix(".result"),
        checkpoint_dir=Path(scope["checkpoints"]),
        wandb_project=_typed(options.overrides).get("trainer.project_name", scope["project"]),
        fields=tuple(fields if seed is None else [*fields, ("seed", str(seed))]),
        log_head=tuple(scope.fill(template) for template in spec.head),
    )


def _num_gpus(spec: Spec, options: Options, scope: Scope) -> int:
    if options.gpus is not None and CPU in options.gpus:
        return 1
    if spec.num_gpus == ALL:
        return len(options.gpus or ())
    own = whole("num_gpus", scope.fill(spec.num_gpus)) if spec.num_gpus else 1
    return max(own, options.gpus_per_exp)


def _seed_words(seed: int | None, scope: Scope) -> list[str]:
    """Repetitions differ in their training levels and draws. Validation levels stay: the repetitions are paired."""
    if seed is None:
        return []
    first, _ = KINDS["whole"](f"{scope['config']:seed.train}", "seed.train")
    return [f"seed.train={int(first) + seed * SEED_STRIDE}"]


def _below(words: Sequence[str | None], overrides: Sequence[str]) -> list[str]:
    """The experiment's words that the user's leave standing: not what those set in the other dialect, or what follows.

    `-- es_manager.train.env_groups=2` takes the place of `training.train_batch_size=8`, and `n_groups` follows it;
    `-- ppo_mini_batch_size=8` is also that of actor and critic.
    """
    from ragen.config import keys

    typed = [key for key in _typed(overrides) if keys.is_key(key)]
    theirs = {target: key for key in typed for target in keys.targets(key)}
    following = set().union(*(keys.followed_by(key) for key in theirs)) - theirs.keys()

    def stands(key: str) -> bool:
        mine = keys.targets(key)
        return key in theirs.values() or not any(target in theirs or target in following for target in mine)

    return [word for word in words if word is not None and stands(word.partition("=")[0])]


def _typed(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (word.lstrip("+").partition("=") for word in overrides)
    return {key: value.strip("'\"") for key, _, value in pairs}


def _check_overrides(spec: Spec, overrides: Sequence[str]) -> None:
    owned = EXPERIMENT_OWNS | dict.fromkeys(spec.owned, "that is what this experiment is about")
    if spec.num_gpus == ALL:
        owned |= dict.fromkeys(("trainer.n_gpus_per_node", "system.n_gpus"), "say --gpus: the run takes all of them")
    for word in overrides:
        key = word.lstrip("+~").partition("=")[0]
        if "=" not in word and not word.startswith("~"):
            raise ConfigError(f"{word!r} after --: takes key=value")
        if key in owned:
            raise ConfigError(f"{word} after --: {owned[key]}")


class Views:
    """For each start, what its runs have in common: the words that no axis takes part in, and the user's."""

    def __init__(self, spec: Spec, shared: Mapping[str, Any], options: Options):
        scope = Scope({**shared, **fixed_values(spec, shared)}, {}, None)
        words = [scope.word(template) for template in spec.overrides if _is_known(template, scope)]
        self._typed = _typed([*(word for word in words if word), *options.overrides])
        self._views: dict[tuple[str, ...], ConfigView] = {}

    def of(self, start: tuple[str, ...]) -> ConfigView:
        return self._views.setdefault(start, ConfigView(self._typed, lambda: self._config(start)))

    def read(self) -> dict[tuple[str, ...], dict[str, str]]:
        """What was looked up, by start."""
        return {start: view.read for start, view in self._views.items() if view.read}

    @staticmethod
    def _config(start: tuple[str, ...]) -> Any:
        from ragen.config.compose import resolve

        recipe, environment = recipe_and_environment(start)
        return resolve(environment, recipe, environ={}).config


def recipe_and_environment(start: Sequence[str]) -> tuple[str | None, list[str]]:
    """What `resolve` takes for a start: `--config-name RECIPE`, or the name of an environment."""
    return (start[1], []) if start[0] == "--config-name" else (None, list(start))


def _is_known(template: str, scope: Scope) -> bool:
    try:
        scope.fill(template)
    except ConfigError:
        return False
    return True


# --- the whole ----------------------------------------------------------------------------------------------------


def _check_labels(cells: Sequence[tuple[Cell, tuple[str, ...]]]) -> None:
    """Two runs in one folder would overwrite each other."""
    first: dict[str, tuple[str, ...]] = {}
    for cell, texts in cells:
        if cell.label in first:
            both = " and ".join(", ".join(values) for values in (first[cell.label], texts))
            raise ConfigError(f"{both} have one label, {cell.label}: their runs would share a folder; keep one of them")
        first[cell.label] = texts


def _is_wanted(cell: Cell, only: Sequence[str]) -> bool:
    end = "" if cell.seed is None else f"-s{cell.seed}"
    names = {cell.name, cell.name.removesuffix(end), cell.label, cell.label.removesuffix(end), cell.group}
    names |= {value for _, value in cell.fields[:1]}  # the swept value as it was typed
    return not only or bool(names & set(only))


def _no_such_run(only: Sequence[str], cells: Sequence[Cell]) -> ConfigError:
    near = did_you_mean(only[0], [cell.label for cell in cells])
    return ConfigError(f"--only {','.join(only)}: there is no such run{near or '; --dry-run lists them'}")


def _reference(spec: Spec, cells: Sequence[tuple[Cell, tuple[str, ...]]]) -> str | None:
    """The label of the run whose swept value is the experiment's reference; 0 and 0.0 are the same."""
    for cell, texts in cells:
        if spec.reference is not None and len(texts) == 1 and same_value(texts[0], spec.reference):
            return cell.label if cell.seed is None else cell.label.removesuffix(f"-s{cell.seed}")
    return None


def _batches(cells: Sequence[Cell], size: int | None) -> tuple[tuple[int, ...], ...]:
    """Consecutive runs of one group, at most `size` of them; without a size, all in one."""
    if size is None:
        return (tuple(range(len(cells))),)
    batches: list[list[int]] = []
    for index, cell in enumerate(cells):
        if not batches or len(batches[-1]) == size or cells[batches[-1][0]].group != cell.group:
            batches.append([])
        batches[-1].append(index)
    return tuple(map(tuple, batches))


def _filled(spec: Spec, options: Options, shared: Mapping[str, Any], cells: Sequence[Cell]) -> Options:
    """The options with the experiment's defaults in them."""
    sizes = {cell.num_gpus for cell in cells}
    if options.gpus is not None:
        _check_gpus(options, cells)
    cooldown = float(number(spec.cooldown, "cooldown")) if options.cooldown is None else options.cooldown
    if not 0 <= cooldown < float("inf"):
        raise ConfigError(f"--cooldown {cooldown:g}: takes seconds, 0 or more")
    max_parallel = options.max_parallel
    if "max_parallel" in shared:
        max_parallel = int(shared["max_parallel"].text)
    elif "parallel" in shared and not shared["parallel"].text:
        max_parallel = 1
    skip = dict(options.settings).get("skip_statuses", ",".join(options.skip_statuses))
    skip_statuses = () if skip == NONE else statuses(skip, "--skip-statuses", ("success", "early_stopped", "fail"))
    return replace(
        options,
        gpus_per_exp=sizes.pop() if len(sizes) == 1 else 1,
        steps=steps(spec, options),
        cooldown=cooldown,
        model=options.model if "model" in spec.options else str(shared["model"]),
        resume=options.resume or spec.always_resume == "True",
        evaluate_turns=spec.evaluate.get("max_turns", ()) if options.evaluate_turns is None else options.evaluate_turns,
        max_parallel=max_parallel,
        skip_statuses=skip_statuses,
    )


def statuses(text: str, where: str, known: Sequence[str]) -> tuple[str, ...]:
    """A list of how runs have ended."""
    found = split(text, where)
    for status in found:
        if status not in known:
            raise ConfigError(f"{where} {status}: there is no such status; choose from {', '.join(known)}")
    return tuple(found)


def _check_gpus(options: Options, cells: Sequence[Cell]) -> None:
    """Slots that are all alike are cut evenly; runs of different sizes only have to fit."""
    if CPU in options.gpus:
        slots.cut(options.gpus, options.gpus_per_exp)
        return
    sizes = {cell.num_gpus for cell in cells}
    if len(sizes) == 1:
        slots.cut(options.gpus, sizes.pop())
    elif sizes and max(sizes) > len(options.gpus):
        large = max(cells, key=lambda cell: cell.num_gpus)
        raise ConfigError(
            f"--gpus {','.join(options.gpus)}: {large.name} takes {large.num_gpus} GPUs; list more, or leave it out"
        )


def _header(spec: Spec, texts: Mapping[str, str], options: Options) -> tuple[str, ...]:
    """What the experiment was told, for the head of its summary."""
    own = [f"{option.option}={texts[variable]}" for variable, option in spec.options.items() if texts[variable]]
    gpus = "auto" if options.gpus is None else ",".join(options.gpus)
    budget = "derived" if options.steps is None else options.steps
    others = [f"steps={budget}", f"gpus={gpus}", f"gpus-per-exp={options.gpus_per_exp}"]
    others += [f"ray-num-cpus={options.ray_num_cpus}"] if "ray_num_cpus" in "".join(spec.overrides) else []
    others += [f"seeds={options.seeds}"] if options.seeds else []
    others += [f"overrides={' '.join(options.overrides)}"] if options.overrides else []
    return tuple(" | ".join(part) for part in (own, others) if part)
