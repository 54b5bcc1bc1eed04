"""The hyper-parameter search: each group starts from the best values of the groups before it.

    fixed_values(spec, {"env_name": "sokoban", "search_group": "2"}, options)    # ({"train_batch_size": "8", …}, {})
    carry(plan)                                                                  # after its runs: the best of them

What a group has found is one JSON file, which is read as data and never evaluated. It says for which environment and
model it was found, and is refused for others. A run's score is the mean return of its last validation; with seeds, the
mean over them. A run that failed or that a rule stopped has none.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

from ragen.errors import ConfigError
from ragen.experiment.cell import Cell, Options, Plan
from ragen.experiment.values import make

if TYPE_CHECKING:
    from ragen.experiment.spec import Spec

SCORE = "val-env/reward"


def axes(spec: "Spec", settings: Mapping[str, str]) -> list[str]:
    """What the chosen group varies; nothing in an experiment that is no search."""
    return list(_groups(spec)[settings["search_group"]]) if spec.search else []


def grid(spec: "Spec", settings: Mapping[str, str]) -> list[tuple[str, list[str]]]:
    parameters = _groups(spec)[settings["search_group"]]
    return [(name, list(entry["values"])) for name, entry in parameters.items()]


def _groups(spec: "Spec") -> dict[str, dict[str, Any]]:
    return spec.search["groups"]


# --- what is known before a group ---------------------------------------------------------------------------------


def fixed_values(spec: "Spec", given: Mapping[str, str], options: Options) -> tuple[dict[str, str], dict[str, str]]:
    """The values of all other groups: as given, as found, or those of the published start; and what was assumed.

    A group before this one must have been given or found; a dry run assumes its published start instead.
    """
    group = given["search_group"]
    if group not in _groups(spec):
        raise ConfigError(f"--search_group {group}: there is no such group; choose from {', '.join(_groups(spec))}")
    for name in _groups(spec)[group]:
        if name in given:
            raise ConfigError(f"--{name} {given[name]}: is what group {group} searches; leave it out")
    found: dict[str, str] = {}
    assumed: dict[str, str] = {}
    for other, parameters in _groups(spec).items():
        missing = [name for name in parameters if name not in given]
        if other == group or not missing:
            continue
        if other > group:
            found |= {name: parameters[name]["later"] for name in missing}
            continue
        known = _found(spec, other, given, options)
        if known is None:
            known = {name: parameters[name]["later"] for name in missing}
            assumed |= known
        found |= {name: known[name] for name in missing}
    return found, assumed


def _found(spec: "Spec", group: str, given: Mapping[str, str], options: Options) -> dict[str, str] | None:
    """What a group before this one has found; None where a dry run has to do without."""
    path = _path(spec, group)
    if not path.is_file():
        if options.dry_run:
            return None
        flags = " ".join(f"--{name} …" for name in _groups(spec)[group])
        base = f" --exp_base_name {given['exp_base_name']}" if "exp_base_name" in given else ""
        base += f" --model {options.model}" if options.model else ""
        raise ConfigError(
            f"{path} is not there: group {given['search_group']} starts from what group {group} finds. Run first\n"
            f"  bash {spec.script} --env_name {given['env_name']}{base} --search_group {group}\n"
            f"or give {flags}"
        )
    stored = _read(path)
    for key, now in (("environment", given["env_name"]), ("model", _model(spec, options))):
        if stored.get(key) != now:
            raise ConfigError(
                f"{path} was found for {key} {stored.get(key)}, not for {now}: run group {group} again, "
                f"or give {', '.join(f'--{name}' for name in _groups(spec)[group])}"
            )
    return {name: _checked(stored, name, entry["kind"], path) for name, entry in _groups(spec)[group].items()}


def _read(path: Path) -> dict[str, Any]:
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read ({error}): delete it and run its group again") from error
    if not isinstance(stored, dict) or not isinstance(stored.get("best"), dict):
        raise ConfigError(f"{path} holds no result of a search: delete it and run its group again")
    return stored


def _checked(stored: Mapping[str, Any], name: str, kind: str, path: Path) -> str:
    if name not in stored["best"]:
        raise ConfigError(f"{path} has no {name}: delete it and run its group again")
    return make(kind, str(stored["best"][name]), f"{path}: {name}").text


def _path(spec: "Spec", group: str) -> Path:
    return Path(spec.search["carried"].format(group=group))


def _model(spec: "Spec", options: Options) -> str:
    return options.model or spec.model or ""


# --- what a group has found ---------------------------------------------------------------------------------------


def carry(plan: Plan) -> str:
    """Store the best values of a group for the groups after it. Returns what to tell the user."""
    from ragen.experiment.plan import expand
    from ragen.experiment.spec import load
    from ragen.store.fsync import write_whole

    spec, settings = load(plan.source), dict(plan.options.settings)
    # Also those that were run before and not asked for this time.
    cells = expand(plan.source, replace(plan.options, only=(), max_parallel=None)).cells
    names = list(_groups(spec)[settings["search_group"]])
    scored = _scores(cells, plan, names)
    if not scored:
        return f"no run of group {settings['search_group']} has a score: nothing is carried on"
    best = max(scored, key=lambda values: scored[values])
    record = {
        "group": settings["search_group"],
        "environment": settings["env_name"],
        "model": _model(spec, plan.options),
        "best": dict(zip(names, best, strict=True)),
        "score": scored[best],
        "metric": SCORE,
        "runs": [{**dict(zip(names, values, strict=True)), "score": score} for values, score in scored.items()],
        "without_score": len({_values(cell, names) for cell in cells}) - len(scored),
    }
    path = _path(spec, settings["search_group"])
    write_whole(path, f"{json.dumps(record, indent=1)}\n".encode())
    shown = ", ".join(f"{name}={value}" for name, value in record["best"].items())
    return f"best of {len(scored)}: {shown} with a mean return of {record['score']:.4g}; kept in {path}"


def _scores(cells: tuple[Cell, ...], plan: Plan, names: list[str]) -> dict[tuple[str, ...], float]:
    """Searched values -> score, of those of which every seed succeeded; in the order of the runs."""
    from ragen.experiment.results import SummaryLog, latest_lines, status_of

    lines = latest_lines(cells, plan.summary_fields, SummaryLog(plan.summary_path).text())
    found: dict[tuple[str, ...], list[float | None]] = {}
    for cell in cells:
        succeeded = cell.name in lines and status_of(lines[cell.name]) == "success"
        found.setdefault(_values(cell, names), []).append(score_of(cell) if succeeded else None)
    return {values: fmean(scores) for values, scores in found.items() if None not in scores}


def _values(cell: Cell, names: list[str]) -> tuple[str, ...]:
    fields = dict(cell.fields)
    return tuple(fields[name] for name in names)


def score_of(cell: Cell) -> float | None:
    """The mean return of a run's last validation."""
    from ragen.experiment.results import run_folder
    from ragen.store.run_folder import RunFolder

    folder = RunFolder(run_folder(cell.log_path) or cell.checkpoint_dir)
    scores = [score for _, score in folder.read_metrics().series(SCORE) if math.isfinite(score)]
    return scores[-1] if scores else None
