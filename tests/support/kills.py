"""Kill a command at any moment, start it again, and compare the end with that of a run that was never killed.

unbroken, seconds = unbroken_run(nursery, tmp_path / "unbroken", words)
for folder in kill_and_go_on(nursery, tmp_path, words, num_kills=6, aims=("rollout", None), seed=1, seconds=seconds):
    assert_same(folder, unbroken)
"""

import json
import random
import re
import time
from collections import Counter
from pathlib import Path

CHANGES = ("timing_", "perf/")  # what may differ: the clock


def run_to_its_end(nursery, words):
    """Returns the run folder."""
    ended = nursery.run(*words)
    assert ended.status == 0, ended.err
    assert "Traceback" not in ended.err
    return Path(re.search(r"^report: (.*)/report.html$", ended.out, re.MULTILINE)[1])


def unbroken_run(nursery, folder, words):
    """Its folder, and how many seconds it took."""
    started = time.monotonic()
    return run_to_its_end(nursery, [*words, f"trainer.default_local_dir={folder}"]), time.monotonic() - started


def kill_once(nursery, words, aim, times, delay):
    """The phase in which a started run was killed, or None if it came to its end before."""
    child = nursery.start(*words)
    if aim is None or child.wait_for(aim, times):
        child.has_ended(delay)
    found = child.kill()
    if found is None:
        assert child.end().status == 0, child.end().err
    return found


def kill_and_go_on(nursery, folder, words, num_kills, aims, seed, seconds=0.0):
    """Run in one folder after the other until so many kills have fallen, and one in each phase aimed at.

    The aims take turns: a phase, entered for the n-th time, or None for any moment of a run of so many seconds.
    """
    drawn, hit, folders = random.Random(seed), [], []

    def is_enough():
        is_done = len(hit) >= num_kills and set(aims) - {None} <= set(hit)
        num_tries = max(len(hit), len(folders))  # a run may come to its end before it is killed
        assert is_done or num_tries < max(3 * num_kills, 24), f"some phase was never hit: {Counter(hit)}"
        return is_done

    while not is_enough():
        folders.append(folder / f"killed-{len(folders)}")
        command = [*words, f"trainer.default_local_dir={folders[-1]}"]
        while not is_enough():
            aim = aims[len(hit) % len(aims)]
            longest = seconds if aim is None else drawn.choice((0.0, 0.02, 0.3))
            found = kill_once(nursery, command, aim, drawn.randint(1, 2), drawn.uniform(0, longest))
            if found is None:
                break
            hit.append(found)
        else:
            assert run_to_its_end(nursery, command) == folders[-1]
    print(f"{len(hit)} kills in {len(folders)} runs: {dict(Counter(hit))}")
    return folders


# --- what must be equal -------------------------------------------------------------------------------------------


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def recorded(folder):
    """Every line of the metrics, without the clock's."""
    return [
        {name: value for name, value in row.items() if not name.startswith(CHANGES)}
        for row in lines(folder / "metrics.jsonl")
    ]


def files(folder, pattern="*"):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob(pattern) if path.is_file()}


def checkpoint_of(folder):
    """All that the last checkpoint holds, without the clock's."""
    (path,) = folder.glob("global_step_*")
    held = files(path)
    del held["manifest.json"]  # it has the sums of the others
    state = json.loads(held.pop("trainer_state.json"))
    del state["totals"]
    return path.name, held, state


def assert_same(folder, unbroken):
    rows = recorded(folder)
    assert [row["step"] for row in rows] == list(range(len(rows)))  # none lost, none twice
    assert rows == recorded(unbroken)
    tables = [run / "group_rv_table.jsonl" for run in (folder, unbroken)]
    assert [lines(table) for table in tables if table.exists()] in ([], [lines(tables[1])] * 2)
    assert files(folder / "episodes") == files(unbroken / "episodes")
    assert json.loads((folder / "finished.json").read_text())["status"] == "finished"
    assert (folder / "report.html").exists()
    assert not [*folder.rglob("*.part"), *folder.rglob("*.replaced")]
