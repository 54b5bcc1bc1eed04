"""Where else the metrics of a run go: W&B and TensorBoard, as `trainer.logger` lists them.

    sinks = make_sinks(config, folder, say=console.note)
    for sink in sinks:
        sink.log(10, metrics)
        sink.table(10, "rollout/group_rv_table", [{"group_id": 3, "reward_std": 0.5}])      # W&B has tables
    for sink in sinks:
        sink.close("finished")              # or early_stopped, failed, interrupted

The run folder holds everything in any case, so a sink may fail: it says so in one line and is off from then on. Only
plain numbers are passed on, under the names that they have, and tables where the sink has such.

W&B writes to `wandb/` below the current folder, or to WANDB_DIR. It goes online only with a key (WANDB_API_KEY, or
netrc) and a host that answers; else it is offline, and the line that says so holds the command that uploads the run
later. It is given its key and its mode, so that it has nothing to ask for. The run's id is kept in the run folder: a
resumed run continues under it, and W&B drops the steps that it already has. TensorBoard's files are in `tensorboard/`
of the run folder.
"""

import netrc
import os
import queue
import re
import secrets
import shutil
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import yaml

from ragen.config.schema import Config
from ragen.config.tree import to_dict
from ragen.extras import pip_command
from ragen.store.fsync import write_whole
from ragen.store.run_folder import RunFolder

# How a run can end, and the exit status that stands for it.
STATUSES = {
    "finished": 0,
    "failed": 1,
    "early_stopped": 3,
    "environment_failed": 4,
    "interrupted": 130,
    "preempted": 143,
}
WANDB_ID = "wandb-id"
ANSWER_S = 3.0  # how long a host may take to answer
INIT_S = 20.0  # W&B: to start a run online
FINISH_S = 60.0  # W&B: to upload the rest at the end; what is left over stays on disk

Say = Callable[[str], None]
Write = Callable[[int, dict[str, float]], None]  # (step, metrics)
WriteTable = Callable[[int, str, Sequence[Mapping[str, Any]]], None]  # (step, name, rows)


class Sink:
    """Metrics go in until something fails."""

    def __init__(
        self, name: str, write: Write, end: Callable[[str], None], say: Say, write_table: WriteTable | None = None
    ):
        self.name, self._write, self._end, self._say, self._write_table = name, write, end, say, write_table
        self._is_on = True

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        if self._is_on:
            self._try(lambda: self._write(step, numbers(metrics)))

    def table(self, step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        """Rows with the same keys. Before `log` of the step, or without it."""
        write_table = self._write_table
        if self._is_on and write_table and rows:
            self._try(lambda: write_table(step, name, rows))

    def close(self, status: str) -> None:
        """The run has ended; `status` is one of STATUSES. A second call does nothing."""
        if status not in STATUSES:
            raise ValueError(f"status {status!r}: must be one of {', '.join(STATUSES)}")
        if self._is_on:
            self._try(lambda: self._end(status))
        self._is_on = False

    def _try(self, action: Callable[[], None]) -> None:
        try:
            action()
        except Exception as error:  # a failing library must not end training
            self._is_on = False
            self._say(f"{self.name}: {_line(error)}; no more metrics go there, the run folder has them all")


@dataclass(frozen=True)
class _Opening:
    """What a sink is made from."""

    config: Config
    folder: RunFolder
    first_step: int
    say: Say
    environ: Mapping[str, str]


def make_sinks(
    config: Config,
    folder: RunFolder,
    *,
    first_step: int = 0,
    say: Say | None = None,
    environ: Mapping[str, str] | None = None,
) -> list[Sink]:
    """A sink for each name in `trainer.logger` that has one here. `first_step`: what a resumed run has behind it.

    `say` gets one line for each of them; without it they go to stderr.
    """
    say = say or (lambda text: print(text, file=sys.stderr, flush=True))
    opening = _Opening(config, folder, first_step, say, os.environ if environ is None else environ)
    sinks = []
    for logger in dict.fromkeys(config.trainer.logger):
        if logger in _SINKS:
            name, open_sink = _SINKS[logger]
            try:
                sink = open_sink(opening)
            except Exception as error:
                say(f"{name}: {_line(error)}; the run continues without it")
            else:
                sinks += [sink] if sink else []
    return sinks


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """The metrics that are numbers, of any library, as plain ones."""
    plain = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items() if key != "step"}
    return {key: value for key, value in plain.items() if isinstance(value, (int, float))}


# --- W&B ----------------------------------------------------------------------------------------------------------


def _open_wandb(opening: _Opening) -> Sink | None:
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # at a host that hangs, its reports do too
    try:
        import wandb
    except ImportError:
        is_installed = False
    else:
        is_installed = hasattr(wandb, "init")  # a folder `wandb/` of earlier runs also imports, as an empty package
    if not is_installed:
        opening.say(f"W&B: the package is not installed ({pip_command('wandb')}); the run continues without it")
        return None
    mode, why = wandb_mode(opening.environ)
    if mode == "disabled":
        opening.say(f"W&B: off ({why})")
        return None
    if mode == "online":
        try:
            run = _start(wandb, opening, "online")
        except Exception as error:
            why = _line(error, secret=wandb_key(opening.environ))
            wandb.teardown()  # its service still holds the run's id
        else:
            opening.say(f"W&B: {run.url}")
            return _wandb_sink(wandb, run, opening)
    run = _start(wandb, opening, "offline")
    place = os.path.relpath(Path(run.dir).parent)
    command = "wandb" if shutil.which("wandb") else f"{sys.executable} -m wandb"
    opening.say(f"W&B: offline ({why}); to upload the run later: {command} sync {place}")
    return _wandb_sink(wandb, run, opening)


def _start(wandb: Any, opening: _Opening, mode: str) -> Any:
    online = mode == "online"
    wandb.setup(wandb.Settings(silent=True))  # what it says before there is a run
    settings = wandb.Settings(
        mode=mode,
        silent=True,
        console="off",  # the live view owns the terminal
        init_timeout=INIT_S,
        finish_timeout=FINISH_S,
        **({"api_key": wandb_key(opening.environ), "base_url": wandb_host(opening.environ)} if online else {}),
    )
    trainer = opening.config.trainer
    return wandb.init(
        project=re.sub(r"[/\\#?%:]", "-", trainer.project_name)[:128],  # without what W&B refuses
        name=trainer.experiment_name,
        id=_run_id(opening.folder),
        resume="allow",
        config=to_dict(opening.config),
        settings=settings,
    )


def _wandb_sink(wandb: Any, run: Any, opening: _Opening) -> Sink:
    newest = opening.first_step

    def write(step: int, metrics: dict[str, float]) -> None:
        """What belongs to an earlier step is shown at the newest, with its own as `step`: W&B takes no others."""
        nonlocal newest
        newest = max(newest, step)
        run.log(metrics if step == newest else metrics | {"step": step}, step=newest)

    def end(status: str) -> None:
        run.summary["status"] = status
        run.finish(exit_code=STATUSES[status])

    def write_table(step: int, name: str, rows: Sequence[Mapping[str, Any]]) -> None:
        table = wandb.Table(columns=list(rows[0]), data=[list(row.values()) for row in rows])
        run.log({name: table}, step=step)

    return Sink("W&B", write, end, opening.say, write_table)


def wandb_mode(environ: Mapping[str, str], answers: Callable[[str], bool] | None = None) -> tuple[str, str]:
    """online, offline or disabled, and why."""
    asked = environ.get("WANDB_MODE", "").lower()
    if asked == "disabled":
        return "disabled", "WANDB_MODE=disabled"
    if asked in ("offline", "dryrun"):
        return "offline", f"WANDB_MODE={asked}"
    if asked not in ("", "online", "run"):
        return "offline", f"WANDB_MODE={asked} is not online, offline or disabled"
    host = wandb_host(environ)
    if not wandb_key(environ):
        return "offline", f"no key for {urlsplit(host).netloc} in WANDB_API_KEY or netrc"
    if not (answers or host_answers)(host):
        return "offline", f"{host} does not answer"
    return "online", f"a key is there and {host} answers"


def wandb_host(environ: Mapping[str, str]) -> str:
    return (environ.get("WANDB_BASE_URL") or "https://api.wandb.ai").rstrip("/")


def wandb_key(environ: Mapping[str, str]) -> str | None:
    """The key of WANDB_API_KEY, or netrc's for this host."""
    if environ.get("WANDB_API_KEY"):
        return environ["WANDB_API_KEY"]
    home = Path(environ.get("HOME") or os.path.expanduser("~"))
    paths = [environ["NETRC"]] if environ.get("NETRC") else [home / ".netrc", home / "_netrc"]
    for path in paths:
        try:
            entry = netrc.netrc(str(path)).hosts.get(urlsplit(wandb_host(environ)).netloc)
        except (OSError, netrc.NetrcParseError, UnicodeDecodeError):
            continue
        if entry and entry[2]:
            return entry[2]
    return None


def host_answers(url: str, seconds: float = ANSWER_S) -> bool:
    """Does a web server speak at this address? Looking up its name counts as waiting too, which no socket limits."""
    answer: queue.Queue[bool] = queue.Queue()
    threading.Thread(target=lambda: answer.put(_speaks(url, seconds)), daemon=True).start()
    try:
        return answer.get(timeout=seconds)
    except queue.Empty:
        return False


def _speaks(url: str, seconds: float) -> bool:
    try:
        urllib.request.urlopen(urllib.request.Request(url, method="HEAD"), timeout=seconds).close()
    except urllib.error.HTTPError as error:
        return error.code < 500 and error.code != 407  # those come from a gateway or a proxy
    except (OSError, ValueError):
        return False
    return True


def _run_id(folder: RunFolder) -> str:
    """The id of the run that this folder holds; made once."""
    path = folder.path / WANDB_ID
    if not path.exists():
        write_whole(path, secrets.token_hex(4).encode())
    return path.read_text().strip()


# --- TensorBoard --------------------------------------------------------------------------------------------------


def _open_tensorboard(opening: _Opening) -> Sink | None:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        how = pip_command("tensorboard")
        opening.say(f"TensorBoard: the package is not installed ({how}); the run continues without it")
        return None
    place = opening.folder.path / "tensorboard"
    # Steps that an earlier process wrote, and that now come again, are hidden.
    writer = SummaryWriter(str(place), purge_step=opening.first_step + 1 if opening.first_step else 0)
    tree = yaml.safe_dump(to_dict(opening.config), sort_keys=False, allow_unicode=True)
    writer.add_text("config", "".join(f"    {line}\n" for line in tree.splitlines()))

    def write(step: int, metrics: dict[str, float]) -> None:
        for key, value in metrics.items():
            writer.add_scalar(key, value, step)
        writer.flush()

    opening.say(f"TensorBoard: tensorboard --logdir {place}")
    return Sink("TensorBoard", write, lambda status: writer.close(), opening.say)


def _line(error: BaseException, secret: str | None = None) -> str:
    """An error on one line, and without a key in it."""
    text = " ".join(str(error).split()) or type(error).__name__
    text = text.replace(secret, "…") if secret else text
    return text if len(text) <= 200 else f"{text[:199]}…"


_SINKS: dict[str, tuple[str, Callable[[_Opening], Sink | None]]] = {
    "wandb": ("W&B", _open_wandb),
    "tensorboard": ("TensorBoard", _open_tensorboard),
}
