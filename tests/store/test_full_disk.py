"""A full disk, for a moment or for good: whole lines or a clear stop, and never a step lost in silence."""

import errno
import json
import os
import resource
import shutil

import pytest
from made_up_runs import make_groups
from small_disk import fill, small_disk

from ragen.store import full_disk, json_lines
from ragen.store.fsync import append_lines, write_whole
from ragen.store.full_disk import WriteFailed
from ragen.store.journal import Journal
from ragen.store.run_folder import FolderLost, RunFolder
from ragen.store.sweep_results import SummaryLog

CONFIG = {"trainer": {"total_training_steps": 3}}
CALLS = ("open", "write", "fsync", "replace")


@pytest.fixture
def patient(monkeypatch):
    monkeypatch.setattr(full_disk, "PAUSE", 0.0)


def contents_of(place):
    files = (path for path in place.rglob("*") if path.is_file())
    return {path.relative_to(place).as_posix(): path.read_bytes() for path in files}


# --- a fault at each call in turn -----------------------------------------------------------------------------------


def operations(place):
    """Everything that appends or replaces, as a run, an evaluation and a sweep do."""
    folder, log = RunFolder(place / "run"), SummaryLog(place / "sweep.log")
    journal = Journal(place / "out", {"model": "pocket"})

    def opened():
        with journal.opened():
            return [journal.append(("Sokoban", 1, 0, member), {"success": True}) for member in range(2)]

    yield lambda: folder.write_config(CONFIG)
    for step in range(1, 3):
        yield lambda step=step: folder.write_episodes(step, "val", make_groups([(100, True)]))
        yield lambda step=step: folder.append_table("table.jsonl", [{"step": step}, {"step": step}])
        yield lambda step=step: folder.append_metrics(step, {"actor/entropy": step / 3})
        yield lambda step=step: append_lines(place / "steps.log", f"step:{step}\n".encode())
        yield lambda step=step: log.append([f"kl={step} | status=success"])
    yield opened
    yield lambda: folder.write_finished("finished", 2)


class Disk:
    """Fails from the `number`-th call on, `num_faults` times; a write takes half of what it is given first."""

    def __init__(self, patch, number, num_faults):
        self.number, self.num_left, self.count = number, num_faults, 0
        for name in CALLS:
            patch.setattr(os, name, self.wrap(getattr(os, name), name))

    def wrap(self, real, name):
        def call(*arguments, **keywords):
            if name == "open" and not (len(arguments) > 1 and arguments[1] & os.O_CREAT):
                return real(*arguments, **keywords)
            self.count += 1
            if self.count >= self.number and self.num_left > 0:
                self.num_left -= 1
                if name == "write" and len(arguments[1]) > 1 and self.num_left % 2 == 0:
                    return real(arguments[0], arguments[1][: len(arguments[1]) // 2])  # a short write, without error
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **keywords)

        return call


def faults(place, monkeypatch, num_faults):
    """The number of each call at which a disk can fail, as long as there are calls; all in one empty directory."""
    number, is_reached = 0, True
    while is_reached:
        shutil.rmtree(place, ignore_errors=True)
        place.mkdir()
        number += 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", lambda descriptor: None)  # slow, and no process dies here
            disk = Disk(patch, number, num_faults)
            yield number
        is_reached = disk.count >= number


def test_a_disk_that_is_full_for_a_moment_loses_nothing(tmp_path, monkeypatch, patient, capsys):
    place = tmp_path / "place"
    place.mkdir()
    for operation in operations(place):
        operation()
    expected, numbers = contents_of(place), []
    for number in faults(place, monkeypatch, num_faults=3):
        for operation in operations(place):
            operation()
        numbers.append(number)
        assert contents_of(place) == expected, number
    assert len(numbers) > 50
    assert "No space left on device; trying again for 30 s" in capsys.readouterr().err


def test_a_disk_that_stays_full_stops_with_whole_lines(tmp_path, monkeypatch, impatient):
    """And what is done again after that ends like a run that was never stopped."""
    place, messages = tmp_path / "place", []
    place.mkdir()
    for operation in operations(place):
        operation()
    expected = contents_of(place)
    for number in faults(place, monkeypatch, num_faults=10**6):
        waiting = list(operations(place))
        try:
            while waiting:
                waiting[0]()
                waiting.pop(0)
        except WriteFailed as error:
            messages.append(str(error))
        for name, content in contents_of(place).items():
            if name.endswith((".jsonl", ".log")):
                assert content.endswith(b"\n") or not content, (number, name)
                assert content in expected[name] or name.startswith("out/"), (number, name)
            elif ".owner" not in name:
                assert content == expected[name], (number, name)
    assert len(messages) > 50
    for message in messages:
        assert message.startswith(str(place)) and "not written (No space left on device)" in message
        assert "Fix: free some disk space, then run the same command again" in message


@pytest.mark.parametrize("keeps", [True, False])
def test_a_line_is_rolled_back_and_half_a_line_swallows_nothing(tmp_path, monkeypatch, impatient, keeps):
    path = tmp_path / "lines.log"
    append_lines(path, b"one\n")
    with path.open("ab") as file:
        file.write(b"by hand")
    with monkeypatch.context() as patch:
        Disk(patch, 2, 10**6)  # the file opens, nothing can be written
        with pytest.raises(WriteFailed, match=r"lines\.log: not written .*it needs 4 bytes, and .* are free"):
            append_lines(path, b"two\n", keeps_half_line=keeps)
    append_lines(path, b"two\n", keeps_half_line=keeps)
    assert path.read_bytes() == (b"one\nby hand\ntwo\n" if keeps else b"one\ntwo\n")


def test_other_errors_fail_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr(full_disk.time, "sleep", None)
    (tmp_path / "lines.jsonl").mkdir()
    with pytest.raises(WriteFailed, match="Is a directory"):
        json_lines.append(tmp_path / "lines.jsonl", {"step": 1})
    (tmp_path / "file").write_text("")
    with pytest.raises(WriteFailed, match="File exists"):
        write_whole(tmp_path / "file" / "inside", b"x")


@pytest.mark.parametrize("limit", [0, 3, 50, 90])
def test_the_systems_limit_on_file_sizes(tmp_path, limit):
    """The same by a real fault, where nothing may be mounted."""
    folder = RunFolder(tmp_path / "run")
    for step in range(2):
        folder.append_metrics(step, {"loss": 0.5})
    before = folder.metrics_path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + limit, hard))
    try:
        with pytest.raises(WriteFailed, match=r"metrics\.jsonl: not written .*ulimit -f"):
            append_steps(folder, range(2, 9), loss=0.5)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    content = folder.metrics_path.read_bytes()
    assert content.startswith(before) and [*map(json.loads, content.splitlines())] and content.endswith(b"\n")


# --- a real disk ----------------------------------------------------------------------------------------------------


@pytest.fixture
def disk(tmp_path):
    with small_disk(tmp_path / "disk", "64k") as place:
        yield place


def append_steps(folder, steps, **metrics):
    for step in steps:
        folder.append_metrics(step, metrics)


def test_a_real_disk_without_space(disk, impatient, monkeypatch, capsys):
    folder = RunFolder(disk / "run")
    with pytest.raises(WriteFailed, match=r"metrics\.jsonl: not written \(No space left on device\): it needs 1\.0 kB"):
        append_steps(folder, range(10_000), text="x" * 980)
    steps = [row["step"] for row in folder.read_metrics().rows]
    assert len(steps) > 40 and steps == list(range(len(steps))) and folder.read_metrics().notes == []
    filler = disk / "fill"
    filler.write_bytes(b"")
    json_lines.rewind(folder.metrics_path, lambda record: record["step"] < 5)
    fill(disk)
    monkeypatch.setattr(full_disk, "PATIENCE", 30.0)
    monkeypatch.setattr(full_disk.time, "sleep", lambda seconds: filler.unlink(missing_ok=True))  # somebody cleans up
    folder.append_metrics(5, {"text": "y" * 9000})
    assert [row["step"] for row in folder.read_metrics().rows] == list(range(6))
    assert "metrics.jsonl: No space left on device; trying again for 30 s" in capsys.readouterr().err


def test_a_start_on_a_full_disk_names_the_file_and_leaves_nothing(disk, impatient):
    fill(disk)
    before = contents_of(disk)
    with pytest.raises(WriteFailed) as caught, RunFolder(disk / "runs" / "run").owned():
        pass
    message = str(caught.value)
    assert message.startswith(str(disk / "runs")) and "Fix: free some disk space" in message
    assert contents_of(disk) == before


# --- a folder that is lost ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["removed", "moved", "taken over"])
def test_a_lost_folder_stops_its_run_and_is_not_made_again(tmp_path, how):
    folder = RunFolder(tmp_path / "run")
    writes = [
        lambda: folder.append_metrics(2, {"loss": 1.0}),
        lambda: folder.append_table("table.jsonl", [{"step": 2}]),
        lambda: folder.write_episodes(2, "val", []),
        lambda: folder.write_report(""),
        lambda: folder.write_finished("finished", 2),
        folder.check_present,
    ]
    with folder.owned():
        folder.write_config(CONFIG)
        folder.append_metrics(1, {"loss": 1.0})
        if how == "removed":
            shutil.rmtree(folder.path)
        elif how == "moved":
            folder.path.rename(tmp_path / "elsewhere")
        else:
            folder.owner_path.write_text("process 1 on elsewhere\n")
        for write in writes:
            with pytest.raises(FolderLost, match=f"{folder} was removed"):
                write()
    assert folder.path.exists() == (how == "taken over")
    if how == "taken over":
        assert folder.owner_path.read_text() == "process 1 on elsewhere\n", "the lock of another process stays"


def test_others_may_write_to_a_folder_without_owning_it(folder):
    folder.append_metrics(1, {"loss": 1.0})
    assert folder.write_report("<html>").exists()
