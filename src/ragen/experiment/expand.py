"""From an experiment and the user's options to the ordered list of its runs.

    expand("kl_sweep", Options(settings=(("kl", "0,0.01"),))).cells[0].name     # sokoban_kl_sweep_nofilter_0-Qwen2.5-3B
    plans("all_kl_entropy", Options())                                          # three plans, to be run in sequence

Only what a name needs is resolved here; `check.py` resolves every run.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice, product
from pathlib import Path
from typing import Any

from ragen.config import keys
from ragen.config.overrides import read_overrides
from ragen.errors import ConfigError, did_you_mean, nearest_of
from ragen.experiment import devices, labels, probed_checkpoint, search
from ragen.experiment.plan import CPU, Options, Plan, in_batches
from ragen.experiment.spec import OptionSpec, Spec, load
from ragen.experiment.template import ConfigView, Value, Variables, choose, count, labelled, make, same_value, split
from ragen.store.sweep_results import Cell

ALL = "all"  # as a number of GPUs: those that are listed
NONE = "none"  # of the statuses to skip
MakeVariables = Callable[[Mapping[str, Any], tuple[str, ...]], Variables]  # from values and the start of a run
SEED_STRIDE = 1_000_000  # between the training seeds of two repetitions: no level is in both
STATUSES = ("success", "early_stopped", "fail")
EXPERIMENT_OWNS = {
    "trainer.experiment_name": "an experiment names its runs itself",
    "model.experiment_name": "an experiment names its runs itself",
    "trainer.default_local_dir": "an experiment chooses the directories of its runs itself",
    "model_path": "use --model",
    "model.base_model": "use --model",
    "trainer.total_training_steps": "use --steps",
    "training.total_training_steps": "use --steps",
    "trainer.n_gpus_per_node": "use --gpus-per-exp",
    "system.n_gpus": "use --gpus-per-exp",
    "system.CUDA_VISIBLE_DEVICES": "use --gpus",
    "system.cuda_visible_devices": "use --gpus",
}


def plans(name: str, options: Options) -> tuple[Plan, ...]:
    """The plans of an experiment, to be run in this order."""
    spec = load(name)
    found = [_expand(load(entry["plan"]), _with_settings(options, entry)) for entry in spec.series]
    found = found or [_expand(spec, options)]
    if any(plan.cells for plan in found):
        return tuple(plan for plan in found if plan.cells)
    near = did_you_mean(options.only[0], [cell.label for plan in found for cell in plan.all_cells])
    raise ConfigError(f"--only {','.join(options.only)}: there is no such run{near or '; --dry-run lists them'}")


def expand(name: str, options: Options) -> Plan:
    """The plan of one experiment. Raises `ConfigError` for a value, a list or a set of GPUs that cannot work."""
    if load(name).series:
        raise ConfigError(f"{name} is several experiments in sequence: see `plans`")
    return plans(name, options)[0]


def _with_settings(options: Options, entry: Mapping[str, str]) -> Options:
    spec = load(entry["plan"])
    fixed = {variable: entry[option.option] for variable, option in spec.options.items() if option.option in entry}
    for name, _ in options.settings:
        if name in fixed:
            raise ConfigError(f"--{name}: this experiment runs all of them; remove it")
    return replace(options, settings=(*options.settings, *fixed.items()))


def _expand(spec: Spec, options: Options) -> Plan:
    _check_overrides(spec, options.overrides)
    options = _with_defaults(spec, options)
    texts, assumed = _settings(spec, options)
    shared = _shared(spec, options, texts)
    fixed = {name: _value(one, one.default or "", shared) for name, one in spec.values.items() if not one.is_list}
    typed = _known_overrides(spec, shared | fixed, options)
    views: dict[tuple[str, ...], ConfigView] = {}

    def variables(values: Mapping[str, Any], start: tuple[str, ...]) -> Variables:
        return Variables(values, spec.derived, views.setdefault(start, ConfigView(start, typed)))

    notes = [f"{name}={value} is assumed, since no earlier group has found one" for name, value in assumed.items()]
    checkpoint = probed_checkpoint.find(spec, variables(shared, tuple(spec.start)))
    if checkpoint is not None:
        shared["checkpoint"] = checkpoint.value
        notes += checkpoint.notes(options.steps)
    grids = list(_grids(spec, shared | fixed, texts))
    points = [_Point(grid, values) for grid in grids for values in product(*grid.axes.values())]
    runs = [(point, cell) for point in points for cell in _cells(spec, options, point, variables)]
    _check_labels(spec, texts, points, options.overrides, variables)
    _check_labels_differ(runs)
    cells = [cell for _, cell in runs]
    kept = [cell for cell in cells if not options.only or _names(cell) & set(options.only)]
    if options.gpus is not None:
        devices.check(options.gpus, options.gpus_per_exp, kept)
    options = _with_slots(options, shared, kept)
    common = variables(shared | fixed, cells[0].start)
    fields = [entry.partition("=")[0] for entry in spec.fields] + spec.timings + (["seed"] if options.seeds else [])
    return Plan(
        name=spec.id,
        title=common.fill(spec.title),
        header=_header(spec, texts, options),
        cells=tuple(kept),
        batches=_batches(kept, count(common.fill(spec.batch), "batch:") if spec.batch else None),
        summary_path=Path(common.fill(spec.summary)),
        summary_fields=tuple(fields),
        options=options,
        source=spec.source,
        all_cells=tuple(cells),
        reference=next((cell.setting for point, cell in runs if point.is_value(spec.reference)), None),
        headings={grid.group: grid.heading for grid in grids if grid.heading},
        append_summary=spec.always_resume,
        wandb_mode=spec.wandb_mode,
        train_environment=dict(spec.environment),
        assumed=assumed,
        built_on={start: view.read for start, view in views.items() if view.read},
        notes=tuple(notes),
        missing="" if checkpoint is None else checkpoint.missing,
    )


# --- options and variables ----------------------------------------------------------------------------------------


def _with_defaults(spec: Spec, options: Options) -> Options:
    """The options with the experiment's defaults."""
    gpus = options.gpus
    if gpus is None and spec.num_gpus == ALL:  # such a run has to know its devices before it has a name
        if options.ray_address:
            raise ConfigError("--ray-address: this experiment takes all GPUs for one run; list them with --gpus LIST")
        gpus = devices.discover()
    return replace(
        options,
        gpus=gpus,
        steps=options.steps or spec.steps,
        cooldown=spec.cooldown if options.cooldown is None else options.cooldown,
        model=options.model if "model" in spec.options else options.model or spec.model,
        resume=options.resume or spec.always_resume,
        evaluate_turns=spec.evaluate.max_turns if options.evaluate_turns is None else options.evaluate_turns,
        skip_statuses=_skipped(spec, options),
    )


def _skipped(spec: Spec, options: Options) -> tuple[str, ...]:
    """The statuses that a resumed experiment skips: those of its option, where it has one."""
    if "skip_statuses" not in spec.options:
        return options.skip_statuses
    text = dict(options.settings).get("skip_statuses", spec.options["skip_statuses"].default or NONE)
    return () if text == NONE else statuses(text, "--skip-statuses", STATUSES)


def _settings(spec: Spec, options: Options) -> tuple[dict[str, str], dict[str, str]]:
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
            raise ConfigError(f"{option.flag} is missing{_one_of(option)}")
    defaults = {variable: option.default or "" for variable, option in spec.options.items()}
    found, assumed = search.fixed_values(spec, given, options) if spec.search.groups else ({}, {})
    return {**defaults, **given, **found}, assumed


def _one_of(option: OptionSpec) -> str:
    return f": one of {', '.join(option.choices)}" if option.cases else ""


def _shared(spec: Spec, options: Options, texts: Mapping[str, str]) -> dict[str, Any]:
    """The variables that are the same in every run."""
    shared: dict[str, Any] = {
        "steps": "" if options.steps is None else str(options.steps),
        "ray_num_cpus": "" if options.ray_num_cpus is None else str(options.ray_num_cpus),
    }
    if "model" not in spec.options:
        shared["model"] = make("model", options.model or "", "--model")
    varied = {*spec.axes, *search.grid(spec, texts)}
    for variable, option in spec.options.items():
        if variable not in varied and not option.is_list:
            shared[variable] = _value(option, texts[variable], shared)
    return shared


def _value(option: OptionSpec, text: str, known: Mapping[str, Any]) -> Value:
    """What an option's text stands for, with the parts that its case gives it."""
    if not text:
        return Value("")
    case = _case(option, text)
    try:
        value = make(option.kind, case or text, option.flag)
    except ConfigError:
        if case is None:
            raise
        value = labelled(case)  # a name beside the numbers: nofilter
    case = case or _case(option, value.text)
    if option.cases and case is None and "*" not in option.cases:
        raise ConfigError(f"{option.flag} {text}: unknown{_one_of(option)}")
    parts = dict(option.cases.get(case or "*", {}))
    overrides = tuple(parts.pop("overrides", ()))
    variables = Variables({**known, "this": value}, {}, None)
    filled = {name: variables.fill(template) for name, template in parts.items()}
    return replace(value, parts={**value.parts, **filled}, overrides=overrides)


def _case(option: OptionSpec, text: str) -> str | None:
    return next((case for case in option.choices if case.lower() == text.lower()), None)


def _known_overrides(spec: Spec, values: Mapping[str, Any], options: Options) -> dict[str, str]:
    """The overrides that do not depend on an axis, and the user's."""
    variables, known = Variables(values, {}, None), []
    for template in spec.overrides:
        try:
            known.append(variables.override(template))
        except ConfigError:
            continue  # it needs a variable that is not known yet
    return _typed([*filter(None, known), *options.overrides])


def _typed(overrides: Sequence[str]) -> dict[str, str]:
    pairs = (override.lstrip("+").partition("=") for override in overrides)
    return {key: value.strip("'\"") for key, _, value in pairs}


# --- grids --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Grid:
    """Axes to combine, and what is fixed meanwhile."""

    axes: dict[str, list[Value]]
    name: str
    known: Mapping[str, Any]  # variables that are the same at all its points
    group: str = ""
    heading: str = ""


@dataclass(frozen=True)
class _Point:
    """One value for each axis of a grid: a run, or its repetitions."""

    grid: _Grid
    values: tuple[Value, ...]

    @property
    def swept(self) -> dict[str, Value]:
        return dict(zip(self.grid.axes, self.values, strict=True))

    def is_value(self, text: str | None) -> bool:
        """Whether it is this value of the only axis."""
        return text is not None and len(self.values) == 1 and same_value(self.values[0].text, text)

    def variables(self, spec: Spec) -> tuple[dict[str, Any], tuple[str, ...]]:
        """Its variables, and what `ragen train` gets first."""
        axes = "_".join(f"{name}_{value}" for name, value in self.swept.items())
        values = {**self.grid.known, **self.swept, "axes": axes}
        return values, tuple(map(Variables(values, spec.derived, None).fill, spec.start))


def _grids(spec: Spec, known: Mapping[str, Any], texts: Mapping[str, str]) -> Iterator[_Grid]:
    if spec.search.groups:
        searched = search.grid(spec, texts)
        axes = {name: [_value(spec.options[name], text, known) for text in one] for name, one in searched.items()}
        yield _Grid(axes, spec.name, known, str(known["search_group"]))
        return
    lists = {
        variable: _values(option, texts.get(variable, option.default or ""), known)
        for variable, option in {**spec.options, **spec.values}.items()
        if option.is_list and variable != "skip_statuses"
    }
    if not spec.groups:
        for name in spec.axes:
            if name not in lists:
                raise ConfigError(f"{spec.id}: the axis {name} is not a variable with a list of values")
        yield _Grid({name: lists[name] for name in spec.axes}, spec.name, known)
        return
    wanted = [choose(value.text, spec.groups, "--groups") for value in lists["groups"]]
    for number, group in spec.groups.items():
        if number in wanted:
            fixed = {name: _value(spec.values[name], text, known) for name, text in group.set.items()}
            axes = {name: lists[name] for name in group.axes}
            yield _Grid(axes, group.name, {**known, **fixed}, number, group.heading)


def _values(option: OptionSpec, text: str, known: Mapping[str, Any]) -> list[Value]:
    items = [part for item in split(text, option.flag) for part in option.aliases.get(item, item).split(",")]
    return [_value(option, item, known) for item in items]


# --- runs ---------------------------------------------------------------------------------------------------------


def _cells(
    spec: Spec,
    options: Options,
    point: _Point,
    make_variables: MakeVariables,
) -> Iterator[Cell]:
    """The runs of one point of a grid, one for each seed."""
    values, start = point.variables(spec)
    variables = make_variables(values, start)
    name = variables["name"] = variables.fill(point.grid.name)
    label = variables.fill(spec.label)
    templates = [*spec.overrides, *(template for value in point.values for template in value.overrides)]
    for seed in [None] if options.seeds is None else range(options.seeds):
        end = "" if seed is None else f"-s{seed}"
        variables = make_variables({**values, "name": name + end}, start)
        num_gpus = _num_gpus(spec, options, variables)
        variables["num_gpus"], variables["project"] = str(num_gpus), variables.fill(spec.project)
        variables["gpus"] = "auto" if options.gpus is None else ",".join(options.gpus)
        variables["checkpoints"] = variables.fill(spec.checkpoints)
        log = Path(variables.fill(spec.log))
        pairs = (entry.partition("=") for entry in spec.fields)
        fields = [(key, variables.fill(template)) for key, _, template in pairs]
        overrides = _below([variables.override(template) for template in templates], options.overrides)
        overrides += options.overrides
        if seed is not None:  # other training levels and draws; the validation levels stay, so repetitions are paired
            first = int(make("whole", f"{variables['config']:seed.train}", "seed.train").text)
            overrides.append(f"seed.train={first + seed * SEED_STRIDE}")
            fields.append(("seed", str(seed)))
        yield Cell(
            name=name + end,
            label=label + end,
            group=point.grid.group,
            start=start,
            overrides=tuple(overrides),
            num_gpus=num_gpus,
            seed=seed,
            log_path=log,
            result_path=log.with_suffix(".result"),
            checkpoint_dir=Path(variables["checkpoints"]),
            wandb_project=_typed(options.overrides).get("trainer.project_name", variables["project"]),
            fields=tuple(fields),
            log_head=tuple(variables.fill(template) for template in spec.head),
        )


def _check_labels(
    spec: Spec,
    texts: Mapping[str, str],
    points: Sequence[_Point],
    overrides: Sequence[str],
    make_variables: MakeVariables,
) -> None:
    """No override may contradict the label of a run."""
    by_start: dict[tuple[str, ...], dict[str, labels.Label]] = {}
    for point in points:
        values, start = point.variables(spec)
        found = labels.labels_of(spec, point.swept, spec.overrides, make_variables(values, start))
        by_start.setdefault(start, {}).update(found)
    labels.check(spec, texts, by_start, overrides)


def _check_labels_differ(runs: Sequence[tuple[_Point, Cell]]) -> None:
    """Each run has its own label."""
    points: dict[str, list[_Point]] = {}
    for point, cell in runs:
        points.setdefault(cell.label, []).append(point)
    for label, same in points.items():
        if len(same) > 1:
            both = " and ".join(", ".join(map(str, point.values)) for point in same[:2])
            raise ConfigError(f"{both} have one label, {label}: their runs would share a directory; keep one of them")


def _with_slots(options: Options, shared: Mapping[str, Any], cells: Sequence[Cell]) -> Options:
    """The options with the size of a slot, and how many runs there may be at once."""
    sizes = {cell.num_gpus for cell in cells}
    max_parallel = 1 if "parallel" in shared and not shared["parallel"].text else options.max_parallel
    if "max_parallel" in shared:
        max_parallel = count(shared["max_parallel"].text, "--max-parallel")
    return replace(options, gpus_per_exp=sizes.pop() if len(sizes) == 1 else 1, max_parallel=max_parallel)


def _num_gpus(spec: Spec, options: Options, variables: Variables) -> int:
    if CPU in (options.gpus or ()):
        return 1
    if spec.num_gpus == ALL:
        return len(options.gpus or ())
    own = count(variables.fill(spec.num_gpus), "num_gpus:") if spec.num_gpus else 1
    return max(own, options.gpus_per_exp)


def _below(own: Sequence[str | None], overrides: Sequence[str]) -> list[str]:
    """The experiment's overrides that the user's do not replace: by the v1 name of a key, or by a key it follows."""
    # `es_manager.train.env_groups=2` replaces `training.train_batch_size=8`, and `n_groups` follows it.
    typed = [key for key in _typed(overrides) if keys.is_key(key)]
    theirs = {target: key for key in typed for target in keys.targets(key)}
    replaced = theirs.keys() | set().union(*map(keys.followed_by, theirs))

    def stands(key: str) -> bool:
        return key in theirs.values() or replaced.isdisjoint(keys.targets(key))

    return [override for override in own if override is not None and stands(override.partition("=")[0])]


def _check_overrides(spec: Spec, overrides: Sequence[str]) -> None:
    owned = EXPERIMENT_OWNS | dict.fromkeys(spec.owned, "this is what the experiment is about")
    if spec.num_gpus == ALL:
        owned |= dict.fromkeys(("trainer.n_gpus_per_node", "system.n_gpus"), "use --gpus: the run takes all of them")
    for override in overrides:
        if "=" not in override and not override.startswith("~"):
            raise ConfigError(f"{override!r} after --: takes key=value")
        key = override.lstrip("+~").partition("=")[0]
        within = [key, *(item.key for item in read_overrides([override], None) if keys.is_group(key))]
        if refused := next((name for name in within if name in owned), None):
            raise ConfigError(f"{override} after --: {owned[refused]}")


# --- the plan -----------------------------------------------------------------------------------------------------


def _names(cell: Cell) -> set[str]:
    """What --only may call it."""
    swept = {value for _, value in cell.fields[:1]}  # as it was typed
    return {cell.name, cell.name.removesuffix(f"-s{cell.seed}"), cell.label, cell.setting, cell.group, *swept}


def _batches(cells: Sequence[Cell], size: int | None) -> tuple[tuple[int, ...], ...]:
    """Consecutive runs of one group, at most `size` of them; without a size, all in one."""
    if size is None:
        return (tuple(range(len(cells))),)
    indices = iter(range(len(cells)))
    return tuple(tuple(islice(indices, len(batch))) for batch in in_batches(cells, size))


def statuses(text: str, where: str, known: Sequence[str]) -> tuple[str, ...]:
    """A list of ways in which runs end."""
    return tuple(choose(status, known, where) for status in split(text, where))


def _header(spec: Spec, texts: Mapping[str, str], options: Options) -> tuple[str, ...]:
    """The options of the experiment, for the head of its summary."""
    own = [f"{option.option}={texts[variable]}" for variable, option in spec.options.items() if texts[variable]]
    gpus = "auto" if options.gpus is None else ",".join(options.gpus)
    budget = "derived" if options.steps is None else options.steps
    others = [f"steps={budget}", f"gpus={gpus}", f"gpus-per-exp={options.gpus_per_exp}"]
    others += [f"ray-num-cpus={options.ray_num_cpus}"] if "ray_num_cpus" in "".join(spec.overrides) else []
    others += [f"seeds={options.seeds}"] if options.seeds else []
    others += [f"overrides={' '.join(options.overrides)}"] if options.overrides else []
    return tuple(" | ".join(part) for part in (own, others) if part)
