"""After the last run of an experiment with `evaluate`: its models play, before and after training, in one table.

    eval_arguments(plan, ["checkpoints/RAGEN/sokoban_pocket_ragen_main"])     # of `ragen eval`
    status = evaluate(plan)                                                   # its exit status

It runs in a separate process on the first device of the experiment, so that no model stays in this one. Its output is
shown and stored in `<summary>_eval.log`, beside table, page and JSON lines. A resumed experiment replaces those; one
that starts from the beginning keeps the older ones with a number, as it does its summary. Episodes are stored in a
journal for each model: an interrupted evaluation, or one that gets another model later, plays only what is missing.
"""

import codecs
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from ragen.evaluate.models import newest_checkpoint
from ragen.evaluate.output import ENDINGS
from ragen.experiment import devices, run_process
from ragen.experiment.plan import CPU, Plan
from ragen.format import harmless
from ragen.store.free_name import rotate
from ragen.store.sweep_results import SummaryLog, reported_path

INTERRUPTED = 130
REPORT_LINE = b"report: "


def evaluate(plan: Plan) -> int:
    """Evaluate the runs that have succeeded."""
    from ragen.experiment.scheduler import child_environment

    folders, skipped = trained(plan)
    if not folders:
        print(f"no evaluation: nothing was trained: {', '.join(skipped)}", flush=True)
        return 1
    if skipped:
        print(f"not evaluated: {', '.join(skipped)}", flush=True)
    resumes = plan.options.resume or plan.append_summary
    for path in [] if resumes else [_output(plan, ending) for ending in ENDINGS]:
        if path.exists():
            rotate(path)
    log = _output(plan, ".log")
    command = [sys.executable, "-m", "ragen", "eval", *eval_arguments(plan, folders)]
    job = run_process.job(command, log, child_environment(plan, (_device(plan),)), append=True)
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    with open(log, "a+b" if resumes else "w+b") as file:
        offset = file.seek(0, 2)

        def show_output() -> None:
            print(harmless(decoder.decode(file.read())), end="", flush=True)

        ended = run_process.run_child(job, show_output)
        show_output()
    status = ended.get("status", 1)
    if status in (INTERRUPTED, -signal.SIGINT):
        print(f"the evaluation was interrupted: run {plan.how_to_resume} to resume", flush=True)
        return INTERRUPTED
    if "error" in ended or status < 0:
        print(f"the evaluation failed: {ended.get('error') or f'killed by signal {-status}'}", flush=True)
        return 1
    report, summary = reported_path(log, REPORT_LINE, offset), SummaryLog(plan.summary_path)
    line = f"evaluation: {report}"
    if status == 0 and report is not None and line not in summary.text().splitlines():
        summary.append([line])
    return status


def eval_arguments(plan: Plan, folders: Sequence[Path]) -> list[str]:
    """The arguments of `ragen eval` for these run directories."""
    device, output = _device(plan), _output(plan)
    return [
        *map(str, folders),
        f"--max-turns={','.join(map(str, plan.options.evaluate_turns or ()))}",
        "--with-base",
        "--keep-journal",
        "--replace",
        f"--output={output.parent}",
        f'output.filename="{output.name}"',
        "output.append_timestamp=False",
        "output.format=jsonl",
        "trainer.n_gpus_per_node=1",
        f"system.CUDA_VISIBLE_DEVICES={-1 if device == CPU else device}",
    ]


def trained(plan: Plan) -> tuple[list[Path], list[str]]:
    """The directories of the runs that have succeeded and saved a model; and the other runs, with the reason."""
    statuses, folders, skipped = plan.statuses(), [], []
    for cell in plan.cells:
        status, folder = statuses[cell.name], cell.run_folder
        if status != "success":
            skipped.append(f"{cell.name} ({status})")
        elif newest_checkpoint(folder) is None:
            skipped.append(f"{cell.name} (no checkpoint in {folder})")
        else:
            folders.append(folder)
    return folders, skipped


def _output(plan: Plan, ending: str = "") -> Path:
    """`log/terminal/sokoban_model_scaling_eval`, with an ending."""
    return plan.summary_path.with_name(f"{plan.summary_path.name.removesuffix('.log')}_eval{ending}")


def _device(plan: Plan) -> str:
    return (plan.options.gpus or devices.FALLBACK)[0]
