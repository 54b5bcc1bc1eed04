"""`ragen sweep NAME [options] [-- overrides]`: read what was asked, make the plan, show or start it.

    sweep(["kl_sweep", "--kl-values", "0,0.01", "--gpus=0,1", "--dry-run", "--", "trainer.test_freq=5"])

`--opt VALUE` and `--opt=VALUE` are the same, and so are `_` and `-` within an option's name. A dry run prints one JSON
object for each run and needs neither GPU nor weights; torch and ray are not imported.
"""

import argparse
import json
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn

from ragen.errors import ConfigError, did_you_mean
from ragen.experiment import evaluation, slots
from ragen.experiment.cell import Cell, Options, Plan, words
from ragen.experiment.check import check_all
from ragen.experiment.device_pool import Device, Pool, num_devices
from ragen.experiment.plan import ALL, NONE, plans, statuses
from ragen.experiment.spec import OptionSpec, Spec, load, names
from ragen.experiment.values import counts, make, number, split
from ragen.extras import require
from ragen.invocation_dir import caller_folder, from_caller, model_from

USAGE = """usage: ragen sweep EXPERIMENT [options] [-- key=value ...]

Run one of the documented experiments, or one of your own. EXPERIMENT --help shows its options.

experiments:
"""
ABOUT_OVERRIDES = """overrides:
  What stands after -- is given to every run: -- es_manager.val.env_groups=64 trainer.test_freq=5
"""


def sweep(arguments: Sequence[str]) -> int:
    """The verb. Raises `ConfigError` for bad input, before anything is started."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), end="")
        return 0
    caller = caller_folder()
    name = _experiment(arguments[0], caller)
    options = read_options(load(name), list(arguments[1:]), caller)
    whole = plans(name, options)
    notes = [note for plan in whole for note in (*_about_assumed(plan), *plan.notes)]
    notes += check_all(whole, options.dry_run)
    notes += [plan.missing for plan in whole if plan.missing]
    for note in dict.fromkeys(notes):
        print(f"note: {note}", file=sys.stderr)
    if not options.dry_run:
        return start(whole)
    for plan in whole:
        for line in dry_run_lines(plan):
            print(json.dumps(line, ensure_ascii=False))
        if plan.options.evaluate_turns:
            then = evaluation.eval_words(plan, [cell.checkpoint_dir for cell in plan.cells])
            print(f"then: ./ragen eval {shlex.join(then)}", file=sys.stderr)
    return 0


def start(whole: Sequence[Plan]) -> int:
    """Run the plans one after the other, each with its evaluation; the worst of the sweeps' exit statuses, or else that
    of the first evaluation that is not 0."""
    from ragen.experiment import search
    from ragen.experiment.scheduler import run

    require("sweep")
    status = evaluated = 0
    for plan in whole:
        ended = run(plan)
        if ended not in (0, 1):  # could not be started, or was interrupted
            return ended
        status = max(status, ended)
        if load(plan.source).search:
            print(search.carry(plan))
        if plan.options.evaluate_turns:
            played = evaluation.evaluate(plan)
            if played == evaluation.INTERRUPTED:
                return played
            evaluated = evaluated or played
    return status or evaluated


def _experiment(name: str, caller: str) -> str:
    """A file is meant from where the user is; the entry scripts change to the repository's root."""
    return from_caller(name, caller) if name.endswith((".yaml", ".yml")) else name


def _about_assumed(plan: Plan) -> list[str]:
    return [f"{name}={value} is assumed, since no earlier group has found one" for name, value in plan.assumed.items()]


# --- dry runs -----------------------------------------------------------------------------------------------------


def dry_run_lines(plan: Plan) -> Iterator[dict[str, Any]]:
    """What would be run, in order. The slot is the one that a run gets if all take equally long."""
    for cell, slot in zip(plan.cells, expected_slots(plan), strict=True):
        line = {
            "experiment": plan.name,
            "name": cell.name,
            "slot": ",".join(slot),
            "log": str(cell.log_path),
            "checkpoints": str(cell.checkpoint_dir),
            "wandb_project": cell.wandb_project,
            "summary": str(plan.summary_path),
            "group": cell.group,
            "start": list(cell.start),
            "overrides": list(words(cell, slot)),
        }
        line |= {"missing": plan.missing} if plan.missing else {}
        yield line | ({"assumed": plan.assumed} if plan.assumed else {})


def expected_slots(plan: Plan) -> list[tuple[str, ...]]:
    """The slots by number of the run: each takes the first that is free, and when none is, all become free."""
    devices = plan.options.gpus or slots.discover()
    slots.cut(devices, plan.options.gpus_per_exp)
    found: list[tuple[str, ...]] = []
    for batch in plan.batches:
        pool, taken = _pool(devices), 0
        for index in batch:
            size = num_devices(plan.cells[index], devices)
            slot = None if taken == plan.options.max_parallel else pool.take(size, 0.0)
            if slot is None:
                pool, taken = _pool(devices), 0
                slot = pool.take(size, 0.0)
            if slot is None:
                raise ConfigError(_too_few(plan.cells[index], devices))
            taken += 1
            found.append(tuple(device.name for device in slot))
    return found


def _pool(devices: Sequence[str]) -> Pool:
    return Pool(Device("here", place, name) for place, name in enumerate(devices))


def _too_few(cell: Cell, devices: Sequence[str]) -> str:
    return f"{cell.name} takes {cell.num_gpus} GPUs, and there are {len(devices)}: --gpus lists more"


# --- options ------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            word = message.removeprefix("unrecognized arguments: ").split()[0]
            near = did_you_mean(word.partition("=")[0], self._option_string_actions)
            where = "" if word.startswith("-") else "; overrides stand after --"
            message = f"unknown option {word}{near}{where}"
        flag = re.fullmatch(r"argument .*?(--[\w-]+): ignored explicit argument '(.*)'", message)
        if flag:
            message = f"{flag[1]}={flag[2]}: takes no value; write {flag[1]}, or leave it out"
        raise ConfigError(f"{message} (see --help)")


class _Model(argparse.Action):
    """A model takes back the size that was said for another one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.model = values
        namespace.own_model_size = None


def read_options(spec: Spec, arguments: list[str], caller: str = "") -> Options:
    """What was typed after the experiment's name; `caller` is the folder that relative paths are meant from."""
    overrides: list[str] = []
    if "--" in arguments:
        place = arguments.index("--")
        arguments, overrides = arguments[:place], arguments[place + 1 :]
    parser = make_parser(spec)
    typed = parser.parse_args(_as_registered(arguments, parser))
    own = {
        option.variable: "True" if value is True else value
        for option in own_options(spec)
        if (value := getattr(typed, f"own_{option.variable}")) not in (None, False)
    }
    for option in own_options(spec):
        _check_not_empty(own.get(option.variable, "given"), option.shown)
        if option.kind == "path" and option.variable in own:
            own[option.variable] = _near(from_caller(own[option.variable], caller))
        if option.kind == "model" and option.variable in own:
            own[option.variable] = ",".join(_model(name, caller) for name in own[option.variable].split(","))
    return Options(
        gpus=None if typed.gpus is None else slots.read(typed.gpus),
        gpus_per_exp=_count(getattr(typed, "gpus_per_exp", None), "--gpus-per-exp") or 1,
        steps=_count(typed.steps, "--steps"),
        cooldown=None if typed.cooldown is None else float(number(typed.cooldown, "--cooldown")),
        model=None if typed.model is None else make("model", _model(typed.model, caller), "--model").text,
        seeds=_count(typed.seeds, "--seeds"),
        resume=typed.resume,
        only=() if typed.only is None else tuple(split(typed.only, "--only")),
        dry_run=typed.dry_run,
        ray_address=typed.ray_address,
        ray_num_cpus=_count(getattr(typed, "ray_num_cpus", None), "--ray-num-cpus"),
        evaluate_turns=_turns(typed.evaluate_turns),
        retry=() if typed.retry is None else statuses(typed.retry, "--retry", ("early_stopped", "success")),
        settings=tuple(own.items()),
        overrides=tuple(overrides),
    )


def _near(path: str) -> str:
    """A path from the repository's root where it lies in there, else a whole one."""
    whole = os.path.normpath(path)
    near = os.path.relpath(whole)
    return whole if near.startswith("..") else near


def _model(name: str, caller: str) -> str:
    """As it was typed, or where the user's folder is."""
    found = model_from(name.strip(), caller)
    return name if found == name.strip() else _near(found)


def _check_not_empty(value: str, where: str) -> None:
    if not value.strip():
        raise ConfigError(f"{where} {value!r}: is empty; leave it out for its default")


def _count(text: str | None, where: str) -> int | None:
    return None if text is None else int(make("count", text, where).text)


def _turns(text: str | None) -> tuple[int, ...] | None:
    """None for the experiment's own; empty for no evaluation."""
    if text is None:
        return None
    return () if text.strip() == NONE else counts(split(text, "--evaluate-turns"), "--evaluate-turns")


def _as_registered(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Options as they are documented: `--gpus_per_exp=2` is `--gpus-per-exp=2`."""
    registered = {name.replace("_", "-"): name for name in parser._option_string_actions}
    found = []
    for word in arguments:
        name, equals, value = word.partition("=")
        known = registered.get(name.replace("_", "-")) if name.startswith("-") else None
        found.append(f"{known}{equals}{value}" if known else word)
    return found


def own_options(spec: Spec) -> list[OptionSpec]:
    """The options that are this experiment's own; a series has those that it does not go through itself."""
    if not spec.series:
        return list(spec.options.values())
    fixed = {option for entry in spec.series for option in entry}
    return [option for option in load(spec.series[0]["plan"]).options.values() if option.option not in fixed]


def make_parser(spec: Spec) -> argparse.ArgumentParser:
    shown = load(spec.series[0]["plan"]) if spec.series else spec
    script = f"bash {spec.script}" if spec.script else f"ragen sweep {spec.id}"
    parser = _Parser(
        prog=script,
        usage=f"{script} [options] [-- key=value ...]",
        description=textwrap.fill(spec.about, 100),
        epilog=_epilog(spec, script),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in own_options(spec):
        _add_own(parser, option)
    common = parser.add_argument_group("options of every experiment")
    for name, settings in _common(shown).items():
        others = shown.names.get(name, [])
        common.add_argument(*[f"--{one}" for one in (name, *others)], **settings)
    return parser


def _epilog(spec: Spec, script: str) -> str:
    examples = "".join(f"  {script} {example}\n" for example in spec.examples)
    if not any(option.required for option in own_options(spec)):
        examples = f"  {script} --dry-run\n{examples}"
    return f"{ABOUT_OVERRIDES}\nexamples:\n{examples}"


def _add_own(parser: argparse.ArgumentParser, option: OptionSpec) -> None:
    flags = [f"-{name}" if len(name) == 1 else f"--{name}" for name in option.names]
    settings: dict[str, Any] = {"dest": f"own_{option.variable}", "help": _help(option)}
    if option.is_flag:
        settings["action"] = "store_true"
    else:
        metavar = "LIST" if option.is_list else option.metavar or _choices(option)
        settings["metavar"] = metavar or option.variable.upper()
    parser.add_argument(*flags, option.shown, **settings)


def _choices(option: OptionSpec) -> str:
    return "{" + ",".join(option.cases) + "}" if option.cases and "*" not in option.cases else ""


def _help(option: OptionSpec) -> str:
    default = f" (default {option.default})" if option.default else ""
    return f"{option.help}{default}".replace("%", "%%")


def _common(spec: Spec) -> Mapping[str, dict[str, Any]]:
    model = f" (default {spec.model})" if spec.model else ""
    steps = f" (default {spec.steps})" if spec.steps else ""
    turns = ",".join(map(str, spec.evaluate.get("max_turns", ()))) or NONE
    between = "two batches" if spec.batch else "two runs of a slot"
    options: dict[str, dict[str, Any]] = {
        "gpus": {"metavar": "LIST", "help": "devices in order, or cpu once for each run at a time (default: all)"},
        "gpus-per-exp": {"metavar": "N", "help": "consecutive devices of a run (default 1)"},
        "steps": {"metavar": "N", "help": f"training steps{steps}"},
        "model": {"action": _Model, "metavar": "NAME", "help": f"hub name, folder, or pocket{model}"},
        "seeds": {"metavar": "N", "help": "repeat every run with N training seeds"},
        "cooldown": {"metavar": "S", "help": f"seconds between {between} (default {spec.cooldown})"},
        "only": {"metavar": "LIST", "help": "only these runs: names, labels or groups"},
        "resume": {"action": "store_true", "help": "skip what the summary log has as done"},
        "retry": {"metavar": "LIST", "help": "run these again when resuming: early_stopped, success"},
        "evaluate-turns": {
            "metavar": "LIST",
            "help": f"evaluate what was trained, with so many turns: 5,25; or {NONE} (default {turns})",
        },
        "ray-address": {"metavar": "ADDRESS", "help": "a cluster to run on (default: RAY_ADDRESS, or this machine)"},
        "dry-run": {"action": "store_true", "help": "print the runs, one JSON object a line, and stop"},
    }
    if spec.num_gpus == ALL:
        del options["gpus-per-exp"]
        options["gpus"]["help"] = "the devices of the run, or cpu (default: all)"
    if spec.checkpoint:
        options["steps"]["help"] = "without effect here: nothing is trained"
    if any("{ray_num_cpus}" in word for word in spec.overrides):
        about = "number of CPUs in the run's own ray_kwargs (default 16)"
        options["ray-num-cpus"] = {"metavar": "N", "default": "16", "help": about}
    return options


def overview() -> str:
    about = "".join(textwrap.indent(textwrap.fill(f"{name}: {load(name).about}", 96), "  ") + "\n" for name in names())
    return f"{USAGE}{about}\n{ABOUT_OVERRIDES}"
