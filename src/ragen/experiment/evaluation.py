"""What follows the last run of an experiment with `evaluate`: its models play, before and after training, in one table.

    eval_words(plan, ["checkpoints/RAGEN/sokoban_pocket_ragen_main"])     # what `ragen eval` gets
    status = evaluate(plan)                                               # its exit status

It is a process of its own on the first device of the experiment, so that nothing of the models stays in this one. What
it says is shown as it comes and kept in `<summary>_eval.log`; table, page and JSON lines lie beside that, under names
that are the experiment's own: resumed, it replaces them; when it starts anew the older ones get a number, as its
summary does. What was played is kept too, in a journal for each model: an evaluation that was interrupted, or
that gets another model after a failed run was made good, plays only what is missing.
"""

import codecs
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from ragen.evaluate.models import newest_checkpoint
from ragen.evaluate.output import ENDINGS
from ragen.experiment import child, slots
from ragen.experiment.cell import CPU, Plan
from ragen.experiment.results import SummaryLog, latest_lines, put_aside, run_folder, said_path, status_of

INTERRUPTED = 130
PAUSE = 0.2  # seconds between two looks at what was said
REPORT_LINE = b"report: "


def evaluate(plan: Plan) -> int:
    """Evaluate the runs that have succeeded."""
    from ragen.experiment.scheduler import child_environment, how_to_go_on

    folders, left_out = trained(plan)
    if not folders:
        print(f"no evaluation, for there is nothing to evaluate: {', '.join(left_out)}", flush=True)
        return 1
    if left_out:
        print(f"not evaluated: {', '.join(left_out)}", flush=True)
    words, log = eval_words(plan, folders), output(plan).with_name(f"{output(plan).name}.log")
    adds = plan.options.resume or plan.append_summary
    if not adds:
        _put_older_aside(plan)
    offset = _begin(log, adds)
    command = [sys.executable, "-m", "ragen", "eval", *words]
    job = child.job(command, log, child_environment(plan, (_device(plan),)), append=True)
    with _shown(log, offset):
        ended = child.run_child(job)
    status = ended.get("status", 1)
    if status in (INTERRUPTED, -signal.SIGINT):
        print(f"the evaluation was interrupted: {how_to_go_on(plan)} goes on", flush=True)
        return INTERRUPTED
    if "error" in ended or status < 0:
        print(f"the evaluation failed: {ended.get('error') or f'killed by signal {-status}'}", flush=True)
        return 1
    report = said_path(log, REPORT_LINE, offset)
    if status == 0 and report is not None:
        _note(SummaryLog(plan.summary_path), f"evaluation: {report}")
    return status


def eval_words(plan: Plan, folders: Sequence[Path]) -> list[str]:
    """The words of `ragen eval` for these run folders."""
    device = _device(plan)
    return [
        *map(str, folders),
        f"--max-turns={','.join(map(str, plan.options.evaluate_turns or ()))}",
        "--with-base",
        "--keep-journal",
        "--replace",
        f"--output={output(plan).parent}",
        f'output.filename="{output(plan).name}"',
        "output.append_timestamp=False",
        "output.format=jsonl",
        "trainer.n_gpus_per_node=1",
        f"system.CUDA_VISIBLE_DEVICES={-1 if device == CPU else device}",
    ]


def output(plan: Plan) -> Path:
    """Where its files lie, without their endings: `log/terminal/sokoban_model_scaling_eval`."""
    return plan.summary_path.with_name(f"{plan.summary_path.name.removesuffix('.log')}_eval")


def trained(plan: Plan) -> tuple[list[Path], list[str]]:
    """The folders of the runs that have succeeded and saved a model; and the other runs, with the reason."""
    latest = latest_lines(plan.cells, plan.summary_fields, SummaryLog(plan.summary_path).text())
    folders, left_out = [], []
    for cell in plan.cells:
        status = status_of(latest.get(cell.name, ""))
        folder = run_folder(cell.log_path) or cell.checkpoint_dir
        if status != "success":
            left_out.append(f"{cell.name} ({status})")
        elif newest_checkpoint(folder) is None:
            left_out.append(f"{cell.name} (no checkpoint in {folder})")
        else:
            folders.append(folder)
    return folders, left_out


def _device(plan: Plan) -> str:
    return (plan.options.gpus or slots.FALLBACK)[0]


def _put_older_aside(plan: Plan) -> None:
    for ending in ENDINGS:
        path = output(plan).with_name(f"{output(plan).name}{ending}")
        if path.exists():
            put_aside(path)


def _begin(log: Path, adds: bool) -> int:
    """Make the log; where what is written to it now begins."""
    with open(log, "ab" if adds else "wb") as file:
        return file.tell()


@contextmanager
def _shown(log: Path, offset: int) -> Iterator[None]:
    """What is written to the log meanwhile is printed too."""
    has_ended = threading.Event()
    copying = threading.Thread(target=_copy, args=(log, offset, has_ended), daemon=True)
    copying.start()
    try:
        yield
    finally:
        has_ended.set()
        copying.join()


def _copy(log: Path, offset: int, has_ended: threading.Event) -> None:
    decoder, is_last = codecs.getincrementaldecoder("utf-8")("replace"), False
    with open(log, "rb") as file:
        file.seek(offset)
        while not is_last:
            is_last = has_ended.wait(PAUSE)
            print(decoder.decode(file.read()), end="", flush=True)


def _note(log: SummaryLog, line: str) -> None:
    """Once, however often the experiment is resumed."""
    if line not in log.text().splitlines():
        log.append([line])
