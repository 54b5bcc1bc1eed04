"""Packages that only some commands need: each is an extra of pyproject.toml.

require("sweep")                         # before `import ray`: installs it, or raises ConfigError with the pip command
install_loggers(["console", "wandb"])    # W&B and TensorBoard are optional: a run continues without them
pip_command("wandb")                     # for a message

In the checkout's own `.venv` a missing extra is installed, with pip's progress on stderr. An environment of the user's
own is never changed.
"""

import importlib
import os
import shlex
import subprocess
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path

from ragen.errors import ConfigError

MODULES = {  # what each extra lets us import
    "sweep": ["ray"],
    "wandb": ["wandb"],
    "tensorboard": ["tensorboard"],
    "plots": ["matplotlib"],
    "sft": ["pyarrow"],
    "api": ["starlette", "uvicorn", "httpx", "tenacity"],
    "gym": ["gymnasium"],
}
ROOT = Path(__file__).resolve().parents[2]
BOOTSTRAP = ROOT / "scripts" / "bootstrap.py"


def require(extra: str) -> None:
    """Make sure that the packages of an extra can be imported."""
    if _is_complete(extra) or _install(extra):
        return
    names = ", ".join(_missing(extra) or [extra])
    if _in_own_environment():
        raise ConfigError(
            f"pip could not install {names}. Is the package index reachable? By hand: {pip_command(extra)}"
        )
    raise ConfigError(f"{names} not installed in this environment. Install with: {pip_command(extra)}")


def install_loggers(loggers: Iterable[str]) -> None:
    """Install what `trainer.logger` names. A logger that is still missing says so itself when the run starts."""
    for name in loggers:
        is_off = name == "wandb" and os.environ.get("WANDB_MODE", "").lower() == "disabled"
        if name in MODULES and not is_off and not _is_complete(name):
            _install(name, "--optional")


def pip_command(extra: str) -> str:
    """What a user types to install an extra into the running environment, from any directory."""
    command = [sys.executable, "-m", "pip", "install"]
    if BOOTSTRAP.exists():
        return shlex.join([*command, "-c", str(ROOT / "constraints.txt"), "-e", f"{ROOT}[{extra}]"])
    return shlex.join([*command, f"ragen[{extra}]"])


def _missing(extra: str) -> list[str]:
    return [name for name in MODULES[extra] if not _can_import(name)]


def _can_import(name: str) -> bool:
    if sys.modules.get(name):
        return True
    spec = find_spec(name)
    return spec is not None and spec.origin is not None  # without: just a directory, such as the `wandb/` of past runs


def _is_complete(extra: str) -> bool:
    """In our own environment only a stamp says that an installation was not interrupted."""
    stamps = [Path(sys.prefix, f".ragen-{scope}") for scope in (extra, "dev")]
    return not _missing(extra) and (not _in_own_environment() or any(stamp.exists() for stamp in stamps))


def _in_own_environment() -> bool:
    """Is this the `.venv` that scripts/bootstrap.py made, and may add to?"""
    environment = ROOT / ".venv"
    is_ours = (environment / ".ragen").exists() and not environment.is_symlink()  # a link leads to another checkout's
    return is_ours and os.path.samefile(sys.prefix, environment)


def _install(extra: str, *options: str) -> bool:
    if not _in_own_environment():
        return False
    command = [sys.executable, "-I", str(BOOTSTRAP), "add", extra, *options]
    status = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
    if status == 130:
        raise KeyboardInterrupt
    importlib.invalidate_caches()
    return status == 0 and not _missing(extra)
