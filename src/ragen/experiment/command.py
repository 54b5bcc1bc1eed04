"""`ragen sweep NAME [options] [-- overrides]`: read the options, make the plan, show or start it.

    sweep(["kl_sweep", "--kl-values", "0,0.01", "--gpus=0,1", "--dry-run", "--", "trainer.test_freq=5"])

`--opt VALUE` and `--opt=VALUE` are the same, and so are `_` and `-` within an option's name. A dry run prints one JSON
object for each run and needs neither GPU nor weights; torch and ray are not imported.
"""

import argparse
import json
import os
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

from ragen.command_hint import hint
from ragen.config.devices import VARIABLE, normal_list
from ragen.errors import ConfigError, did_you_mean
from ragen.experiment import devices, evaluation
from ragen.experiment.check import check_all
from ragen.experiment.cluster import Device
from ragen.experiment.expand import ALL, NONE, plans, statuses
from ragen.experiment.plan import Options, Plan, cluster_address, overrides_on
from ragen.experiment.spec import OptionSpec, Spec, load, names
from ragen.experiment.template import count, counts, make, number, split
from ragen.extras import require
from ragen.invocation_dir import caller_folder, from_caller, model_from

USAGE = """usage: ragen sweep EXPERIMENT [options] [-- key=value ...]

Run one of the documented experiments, or your own. EXPERIMENT --help shows its options.

experiments:
"""
ABOUT_OVERRIDES = """overrides:
  What follows -- is given to every run: -- es_manager.val.env_groups=64 trainer.test_freq=5
"""
# Common option -> its value, from the text and the name of the option.
READERS: dict[str, Callable[[str, str], Any]] = {
    "gpus": lambda text, where: devices.read(text),
    "gpus_per_exp": count,
    "steps": count,
    "cooldown": lambda text, where: float(number(text, where)),
    "model": lambda text, where: make("model", text, where).text,
    "seeds": count,
    "only": lambda text, where: tuple(split(text, where)),
    "ray_num_cpus": count,
    "evaluate_turns": lambda text, where: () if text.strip() == NONE else counts(split(text, where), where),
    "retry": lambda text, where: statuses(text, where, ("early_stopped", "success")),
}


def sweep(arguments: Sequence[str]) -> int:
    """The command. Raises `ConfigError` for bad input, before anything is started."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(overview(), end="")
        return 0
    caller = caller_folder()
    name = arguments[0]
    if name.endswith((".yaml", ".yml")):  # a path starts at the user's directory
        name = from_caller(name, caller)
    options = read_options(load(name), list(arguments[1:]), caller)
    whole = plans(name, options)
    notes = [note for plan in whole for note in plan.notes] + check_all(whole, options.dry_run)
    for note in dict.fromkeys([*notes, *(plan.missing for plan in whole if plan.missing)]):
        print(f"note: {note}", file=sys.stderr)
    if not options.dry_run:
        return start(whole)
    for plan in whole:
        for line in dry_run_lines(plan):
            print(json.dumps(line, ensure_ascii=False))
        if plan.options.evaluate_turns:
            then = evaluation.eval_arguments(plan, [cell.checkpoint_dir for cell in plan.cells])
            print(f"then: {hint('eval', *then)}", file=sys.stderr)
    return 0


def start(whole: Sequence[Plan]) -> int:
    """Run the plans in sequence, each with its evaluation. Returns the worst exit status of the sweeps, or else the
    first one of an evaluation that is not 0."""
    require("sweep")
    from ragen.experiment import scheduler, search

    status = evaluated = 0
    for plan in whole:
        ended = scheduler.run(plan)
        if ended not in (0, 1):  # could not be started, or was interrupted
            return ended
        status = max(status, ended)
        if load(plan.source).search.groups:
            print(search.carry(plan))
        if plan.options.evaluate_turns:
            played = evaluation.evaluate(plan)
            if played == evaluation.INTERRUPTED:
                return played
            evaluated = evaluated or played
    return status or evaluated


# --- dry runs -----------------------------------------------------------------------------------------------------


def dry_run_lines(plan: Plan) -> Iterator[dict[str, Any]]:
    """The runs in order. The slot is the one that a run gets if all take equally long."""
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
            "overrides": list(overrides_on(cell, slot)),
        }
        sometimes = {"missing": plan.missing, "assumed": plan.assumed}
        yield line | {key: value for key, value in sometimes.items() if value}


def expected_slots(plan: Plan) -> Iterator[tuple[str, ...]]:
    """For each run the first slot that is free; when none is, all become free."""
    listed = plan.options.gpus or devices.discover()
    devices.check(listed, plan.options.gpus_per_exp, plan.cells)
    for batch in plan.batches:
        pool, taken = None, 0
        for index in batch:
            size = plan.cells[index].num_gpus
            slot = pool.take(size, 0.0) if pool and taken != plan.options.max_parallel else None
            if slot is None:
                pool, taken = devices.Pool(Device("here", *one) for one in enumerate(listed)), 0
                slot = pool.take(size, 0.0) or ()
            taken += 1
            yield tuple(device.name for device in slot)


# --- options ------------------------------------------------------------------------------------------------------


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        if message.startswith("unrecognized arguments: "):
            argument = message.removeprefix("unrecognized arguments: ").split()[0]
            near = did_you_mean(argument.partition("=")[0], self._option_string_actions)
            hint = "" if argument.startswith("-") else "; overrides follow --"
            message = f"unknown option {argument}{near}{hint}"
        flag = re.fullmatch(r"argument .*?(--[\w-]+): ignored explicit argument '(.*)'", message)
        if flag:
            message = f"{flag[1]}={flag[2]}: takes no value; write {flag[1]}, or remove it"
        raise ConfigError(f"{message} (see --help)")


class _Model(argparse.Action):
    """A model resets the size that was given for another one."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        namespace.model = values
        namespace.own_model_size = None


def read_options(spec: Spec, arguments: list[str], caller: str = "") -> Options:
    """The arguments after the experiment's name; `caller` is the directory that relative paths start at."""
    overrides: list[str] = []
    if "--" in arguments:
        split_at = arguments.index("--")
        arguments, overrides = arguments[:split_at], arguments[split_at + 1 :]
    parser = make_parser(spec)
    typed = vars(parser.parse_args(_as_registered(arguments, parser)))
    if typed["model"] is not None:
        typed["model"] = _model(typed["model"], caller)
    given = {name: text for name, text in typed.items() if not name.startswith("own_") and text is not None}
    read = {name: READERS[name](text, f"--{name.replace('_', '-')}") for name, text in given.items() if name in READERS}
    settings = tuple(_own_settings(spec, typed, caller))
    return _on_this_machine(Options(**given | read, settings=settings, overrides=tuple(overrides)))


def _on_this_machine(options: Options) -> Options:
    """With the devices that `--gpus` stands for. A dry run needs none."""
    visible = os.environ.get(VARIABLE)
    if cluster_address(options) is not None or (options.dry_run and not normal_list(visible, f"variable {VARIABLE}")):
        return options
    return replace(options, gpus=devices.chosen(options.gpus, visible))


def _own_settings(spec: Spec, typed: Mapping[str, Any], caller: str) -> Iterator[tuple[str, str]]:
    for option in own_options(spec):
        value = typed[f"own_{option.variable}"]
        if value in (None, False):
            continue
        text = str(value)
        if not text.strip():
            raise ConfigError(f"{option.flag} {text!r}: is empty; remove it to get the default")
        if option.kind == "path":
            text = _near(from_caller(text, caller))
        if option.kind == "model":
            text = ",".join(_model(name, caller) for name in text.split(","))
        yield option.variable, text


def _near(path: str) -> str:
    """A path relative to the repository's root where it lies below, else an absolute one."""
    whole = os.path.normpath(path)
    near = os.path.relpath(whole)
    return whole if near.startswith("..") else near


def _model(name: str, caller: str) -> str:
    """As it was typed, or the directory that it names as seen from the user."""
    found = model_from(name.strip(), caller)
    return name if found == name.strip() else _near(found)


def _as_registered(arguments: Sequence[str], parser: argparse.ArgumentParser) -> list[str]:
    """Options as they are documented: `--gpus_per_exp=2` is `--gpus-per-exp=2`."""
    registered = {name.replace("_", "-"): name for name in parser._option_string_actions}
    found = []
    for argument in arguments:
        name, equals, value = argument.partition("=")
        known = registered.get(name.replace("_", "-")) if name.startswith("-") else None
        found.append(f"{known}{equals}{value}" if known else argument)
    return found


def own_options(spec: Spec) -> list[OptionSpec]:
    """The experiment's own options; a series has those of its parts that it does not set itself."""
    if not spec.series:
        return list(spec.options.values())
    fixed = {option for entry in spec.series for option in entry}
    return [option for option in load(spec.series[0]["plan"]).options.values() if option.option not in fixed]


def make_parser(spec: Spec) -> argparse.ArgumentParser:
    shown = load(spec.series[0]["plan"]) if spec.series else spec
    script = f"bash {spec.script}" if Path(spec.script or "?").exists() else f"ragen sweep {spec.id}"
    options = own_options(spec)
    first = [] if any(option.required for option in options) else ["--dry-run"]
    examples = "".join(f"  {script} {example}\n" for example in [*first, *spec.examples])
    parser = _Parser(
        prog=script,
        usage=f"{script} [options] [-- key=value ...]",
        description=textwrap.fill(spec.about, 100),
        epilog=f"{ABOUT_OVERRIDES}\nexamples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for option in options:
        _add_own(parser, option)
    common = parser.add_argument_group("options of every experiment")
    for name, settings in _common(shown).items():
        common.add_argument(*[f"--{one}" for one in (name, *shown.names.get(name, []))], **settings)
    return parser


def _add_own(parser: argparse.ArgumentParser, option: OptionSpec) -> None:
    flags = [f"-{name}" if len(name) == 1 else f"--{name}" for name in option.names]
    default = f" (default {option.default})" if option.default else ""
    choices = "{" + ",".join(option.cases) + "}" if option.cases and "*" not in option.cases else ""
    metavar = "LIST" if option.is_list else option.metavar or choices or option.variable.upper()
    kind: dict[str, Any] = {"action": "store_true"} if option.is_flag else {"metavar": metavar}
    about = f"{option.help}{default}".replace("%", "%%")
    parser.add_argument(*flags, option.flag, dest=f"own_{option.variable}", help=about, **kind)


def _common(spec: Spec) -> Mapping[str, dict[str, Any]]:
    model = f" (default {spec.model})" if spec.model else ""
    steps = f" (default {spec.steps})" if spec.steps else ""
    turns = ",".join(map(str, spec.evaluate.max_turns)) or NONE
    between = "two batches" if spec.batch else "two runs of a slot"
    options: dict[str, dict[str, Any]] = {
        "gpus": {
            "metavar": "LIST",
            "help": "devices in order, within CUDA_VISIBLE_DEVICES; or cpu once for each run at a time (default: all)",
        },
        "gpus-per-exp": {"metavar": "N", "help": "consecutive devices of a run (default 1)"},
        "steps": {"metavar": "N", "help": f"training steps{steps}"},
        "model": {"action": _Model, "metavar": "NAME", "help": f"hub name, directory, or pocket{model}"},
        "seeds": {"metavar": "N", "help": "repeat every run with N training seeds"},
        "cooldown": {"metavar": "S", "help": f"seconds between {between} (default {spec.cooldown:g})"},
        "only": {"metavar": "LIST", "help": "only these runs: names, labels or groups"},
        "resume": {"action": "store_true", "help": "skip the runs that the summary log has as done"},
        "retry": {"metavar": "LIST", "help": "run these again when resuming: early_stopped, success"},
        "evaluate-turns": {
            "metavar": "LIST",
            "help": f"evaluate the trained models with these numbers of turns: 5,25; or {NONE} (default {turns})",
        },
        "ray-address": {"metavar": "ADDRESS", "help": "a cluster to run on (default: RAY_ADDRESS, or this machine)"},
        "dry-run": {"action": "store_true", "help": "print the runs, one JSON object a line, and stop"},
    }
    if spec.num_gpus == ALL:
        del options["gpus-per-exp"]
        options["gpus"]["help"] = "the devices of the run, or cpu (default: all)"
    if spec.checkpoint:
        options["steps"]["help"] = "without effect here: nothing is trained"
    if any("{ray_num_cpus}" in override for override in spec.overrides):
        about = "number of CPUs in the run's own ray_kwargs (default 16)"
        options["ray-num-cpus"] = {"metavar": "N", "default": "16", "help": about}
    return options


def overview() -> str:
    about = "".join(textwrap.indent(textwrap.fill(f"{name}: {load(name).about}", 96), "  ") + "\n" for name in names())
    return f"{USAGE}{about}\n{ABOUT_OVERRIDES}"
