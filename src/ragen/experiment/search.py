"""The hyper-parameter search: each group starts from the best values of the groups before it.

    fixed_values(spec, {"env_name": "sokoban", "search_group": "2"}, options)    # ({"train_batch_size": "8", …}, {})
    carry(plan)                                                                  # after its runs: stores the best

The result of a group is one JSON file. It names its environment and model, and is refused for others. A run's score is
the mean return of its last validation; with seeds, the mean over them. A run that failed or that a rule stopped has no
score.
"""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from ragen.errors import ConfigError
from ragen.experiment.plan import Options, Plan
from ragen.experiment.spec import Spec, load
from ragen.experiment.template import choose, make
from ragen.store.fsync import write_whole
from ragen.store.run_folder import RunFolder
from ragen.store.sweep_results import Cell

SCORE = "val-env/reward"


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
    for other, parameters in groups.items():
        published = {name: one.later for name, one in parameters.items() if name not in given}
        if other == group or not published:
            continue
        known = None if other > group else _found(spec, other, given, options)
        found |= published if known is None else {name: known[name] for name in published}
        if other < group and known is None:
            assumed |= published
    return found, assumed


def _found(spec: Spec, group: str, given: Mapping[str, str], options: Options) -> dict[str, str] | None:
    """What a group before this one has found; None if a dry run has to do without."""
    path, parameters = _path(spec, group), spec.search.groups[group]
    flags = [f"--{name}" for name in parameters]
    if not path.is_file():
        if options.dry_run:
            return None
        base = f" --exp_base_name {given['exp_base_name']}" if "exp_base_name" in given else ""
        base += f" --model {options.model}" if options.model else ""
        raise ConfigError(
            f"{path} not found: group {given['search_group']} starts from what group {group} finds. Run first\n"
            f"  bash {spec.script} --env_name {given['env_name']}{base} --search_group {group}\n"
            f"or give {' '.join(f'{flag} …' for flag in flags)}"
        )
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
            raise ConfigError(f"{path} has no {name}: delete it and run its group again")
    return {name: make(one.kind, str(best[name]), f"{path}: {name}").text for name, one in parameters.items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete it and run its group again") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("best"), dict):
        raise ConfigError(f"{path} holds no result of a search: delete it and run its group again")
    return stored


def _path(spec: Spec, group: str) -> Path:
    return Path(spec.search.carried.format(group=group))


def carry(plan: Plan) -> str:
    """Store the best values of a group for the groups after it. Returns a line for the user."""
    spec, settings = load(plan.source), dict(plan.options.settings)
    group = settings["search_group"]
    names = list(spec.search.groups[group])
    scored = _scores(plan, names)
    known = {values: fmean(scores) for values, scores in scored.items() if not any(map(math.isnan, scores))}
    if not known:
        return f"no run of group {group} has a score: nothing is stored for the next group"
    best = max(known, key=known.__getitem__)
    found = dict(zip(names, best, strict=True))
    record = {
        "group": group,
        "environment": settings["env_name"],
        "model": plan.options.model or spec.model or "",
        "best": found,
        "score": known[best],
        "metric": SCORE,
        "runs": [{**dict(zip(names, values, strict=True)), "score": score} for values, score in known.items()],
        "without_score": len(scored) - len(known),
    }
    path = _path(spec, group)
    write_whole(path, f"{json.dumps(record, indent=1)}\n".encode())
    values = ", ".join(f"{name}={value}" for name, value in found.items())
    return f"best of {len(known)}: {values} with a mean return of {known[best]:.4g}; stored in {path}"


def _scores(plan: Plan, names: list[str]) -> dict[tuple[str, ...], list[float]]:
    """Searched values -> score of each seed, NaN unless it succeeded. Also of runs that --only skipped this time."""
    statuses = plan.statuses()
    found: dict[tuple[str, ...], list[float]] = {}
    for cell in plan.all_cells:
        fields = dict(cell.fields)
        scores = found.setdefault(tuple(fields[name] for name in names), [])
        scores.append(score_of(cell) if statuses[cell.name] == "success" else math.nan)
    return found


def score_of(cell: Cell) -> float:
    """The mean return of a run's last validation; NaN without one."""
    series = RunFolder(cell.run_folder).read_metrics().series(SCORE)
    return next((score for _, score in reversed(list(series)) if math.isfinite(score)), math.nan)
