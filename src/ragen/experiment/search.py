"""The hyper-parameter search: each group starts from the best values of the groups before it.

    fixed_values(spec, {"env_name": "sokoban", "search_group": "2"}, options)    # ({"train_batch_size": "8", …}, {})
    carry(plan)                                                                  # after its runs: stores the best

The result of a group is one JSON file for each environment, model and experiment name; it also holds the first two, and
is refused for others. A run's score is the mean return of its last validation; with seeds, the mean over them. A run
has no score if it failed, if a rule stopped it, or if it was made with other settings than those of the plan. Of equal
scores the first counts, and the others are named.
"""

import json
import math
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ragen.config.devices import VARIABLE
from ragen.errors import ConfigError
from ragen.experiment import devices
from ragen.experiment.plan import Options, Plan
from ragen.experiment.results import changed_settings
from ragen.experiment.spec import Spec, load
from ragen.experiment.template import Variables, choose, make
from ragen.store.fsync import write_whole
from ragen.store.reading import read_json
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import Cell, recorded_cells

SCORE = "val-env/reward"
SEARCH_AGAIN = "delete it and run its group again"


def grid(spec: Spec, settings: Mapping[str, str]) -> dict[str, list[str]]:
    """What the chosen group varies; nothing in an experiment that is not a search."""
    searched = spec.search.groups[settings["search_group"]] if spec.search.groups else {}
    return {name: one.values for name, one in searched.items()}


def fixed_values(spec: Spec, given: Mapping[str, str], options: Options) -> tuple[dict[str, str], dict[str, str]]:
    """The values of all other groups: as given, as found, or those of the published start; and what was assumed.

    A group before this one must have been given or found; a dry run assumes its published start instead.
    """
    groups = spec.search.groups
    group = choose(given["search_group"], groups, "--search_group")
    for name in groups[group]:
        if name in given:
            raise ConfigError(f"--{name} {given[name]}: is what group {group} searches; remove it")
    found: dict[str, str] = {}
    assumed: dict[str, str] = {}
    missing: dict[str, Path] = {}
    for other, parameters in groups.items():
        published = {name: one.later for name, one in parameters.items() if name not in given}
        if other == group or not published:
            continue
        path = _path(spec, other, given, options)
        if other < group and path.is_file():
            best = _found(spec, other, path, given, options)
            found |= {name: best[name] for name in published}
            continue
        found |= published
        if other < group:
            missing[other] = path
            assumed |= published
    if missing and not options.dry_run:
        raise ConfigError(_run_first(spec, group, missing, given, options))
    return found, assumed


def _run_first(spec: Spec, group: str, missing: Mapping[str, Path], given: Mapping[str, str], options: Options) -> str:
    """Which groups have no result yet, and the commands that make them, in order."""
    others = {name: text for name, text in given.items() if name != "search_group"}
    words = [f"--{name}" if text == "True" else f"--{name}={text}" for name, text in others.items()]
    gpus = options.gpus and devices.as_typed(options.gpus, os.environ.get(VARIABLE))
    common = {"model": options.model, "steps": options.steps, "seeds": options.seeds, "gpus": gpus}
    words += [f"--{name}={value}" for name, value in common.items() if value is not None]
    words += [f"--n_gpus={options.gpus_per_exp}"] if options.gpus_per_exp > 1 else []
    end = ["--", *options.overrides] if options.overrides else []
    commands = [shlex.join([*words, f"--search_group={one}", *end]) for one in missing]
    flags = [f"--{name} …" for one in missing for name in spec.search.groups[one] if name not in given]
    return (
        f"{', '.join(map(str, missing.values()))} not found: group {group} starts from what the groups before it find. "
        "Run first\n"
        + "".join(f"  bash {spec.script} {command}\n" for command in commands)
        + f"or give {' '.join(flags)}"
    )


def _found(spec: Spec, group: str, path: Path, given: Mapping[str, str], options: Options) -> dict[str, str]:
    """What a group before this one has found."""
    parameters = spec.search.groups[group]
    flags = [f"--{name}" for name in parameters]
    stored = _read(path)
    for key, now in (("environment", given["env_name"]), ("model", options.model or spec.model)):
        if stored.get(key) != now:
            raise ConfigError(
                f"{path} was found for {key} {stored.get(key)}, not for {now}: run group {group} again, "
                f"or give {', '.join(flags)}"
            )
    best = stored["best"]
    for name in parameters:
        if name not in best:
            raise ConfigError(f"{path} has no {name}: {SEARCH_AGAIN}")
    return {name: make(one.kind, str(best[name]), f"{path}: {name}").text for name, one in parameters.items()}


def _read(path: Path) -> dict[str, Any]:
    stored = read_json(path, fix=SEARCH_AGAIN) or {}
    if not isinstance(stored.get("best"), dict):
        raise ConfigError(f"{path} holds no result of a search: {SEARCH_AGAIN}")
    return stored


def _path(spec: Spec, group: str, settings: Mapping[str, str], options: Options) -> Path:
    """The result of a group: a file for each environment, model and experiment name."""
    texts = {name: settings.get(name) or option.default or "" for name, option in spec.options.items()}
    values = {name: make(spec.options[name].kind, text, f"--{name}") for name, text in texts.items() if text}
    model = make("model", options.model or spec.model or "", "--model")
    return Path(Variables({**values, "model": model, "group": group}, {}, None).fill(spec.search.carried))


def carry(plan: Plan) -> str:
    """Store the best values of a group for the groups after it. Returns a line for the user."""
    spec, settings = load(plan.source), dict(plan.options.settings)
    group = settings["search_group"]
    names = list(spec.search.groups[group])
    scored = _scores(plan, names)
    known = {values: fmean(scores) for values, scores in scored.items() if not any(map(math.isnan, scores))}
    if not known:
        return f"no run of group {group} has a score: nothing is stored for the next group"
    best, *tied = [values for values, score in known.items() if score == max(known.values())]
    found = _by_name(names, best)
    record = {
        "group": group,
        "environment": settings["env_name"],
        "model": plan.options.model or spec.model or "",
        "best": found,
        "tied": [_by_name(names, values) for values in tied],
        "score": known[best],
        "metric": SCORE,
        "runs": [{**_by_name(names, values), "score": score} for values, score in known.items()],
        "without_score": len(scored) - len(known),
    }
    path = _path(spec, group, settings, plan.options)
    write_whole(path, f"{json.dumps(record, indent=1)}\n".encode())
    tie = f", tied with {'; '.join(_shown(names, values) for values in tied)}: the first is taken" if tied else ""
    score = f"with a mean return of {known[best]:.4g}{tie}"
    return f"best of {len(known)}: {_shown(names, best)} {score}; stored in {path}"


def _by_name(names: list[str], values: tuple[str, ...]) -> dict[str, str]:
    return dict(zip(names, values, strict=True))


def _shown(names: list[str], values: tuple[str, ...]) -> str:
    return ", ".join(f"{name}={value}" for name, value in _by_name(names, values).items())


def _scores(plan: Plan, names: list[str]) -> dict[tuple[str, ...], list[float]]:
    """Searched values -> score of each seed, NaN unless it succeeded. Also of runs that --only skipped this time."""
    statuses, recorded = plan.statuses(), recorded_cells(plan.summary_path)
    found: dict[tuple[str, ...], list[float]] = {}
    for cell in plan.all_cells:
        fields = dict(cell.fields)
        scores = found.setdefault(tuple(fields[name] for name in names), [])
        is_ours = not changed_settings(cell, recorded.get(cell.name, cell))
        scores.append(score_of(cell) if statuses[cell.name] == "success" and is_ours else math.nan)
    return found


def score_of(cell: Cell) -> float:
    """The mean return of a run's last validation; NaN without one."""
    series = RunFolder(cell.run_folder).read_metrics().series(SCORE)
    return next((score for _, score in reversed(list(series)) if math.isfinite(score)), math.nan)
