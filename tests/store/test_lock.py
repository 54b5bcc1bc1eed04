"""One lock: held by the system, naming its owner, gone with its process."""

from pathlib import Path

import pytest
from processes import PATIENCE, lock_holder

from ragen.errors import ConfigError
from ragen.store import lock
from ragen.store.lock import Locked, is_locked, locked, try_lock


@pytest.fixture
def holder(tmp_path):
    """Another process that holds the lock until its input ends."""
    path = tmp_path / "a.lock"
    with lock_holder(path, note="first") as process:
        yield path, process


def test_who_holds_it_is_named(holder):
    path, process = holder
    for attempt in (lambda: try_lock(path), lambda: locked(path, blocking=False).__enter__()):
        with pytest.raises(Locked, match=rf"a\.lock is locked by process {process.pid} on .+ \(first\)$") as error:
            attempt()
        assert isinstance(error.value, ConfigError) and error.value.path == path
    assert is_locked(path)


def test_a_killed_process_holds_nothing(holder):
    path, process = holder
    process.kill()
    process.wait(PATIENCE)
    assert path.exists() and not is_locked(path)
    try_lock(path).release()
    assert not path.exists()


def test_a_blocking_call_waits_and_reports_once(holder):
    path, process = holder
    waited = []

    def on_wait(owner):
        waited.append(owner)
        process.stdin.close()

    with locked(path, on_wait=on_wait):
        assert process.wait(PATIENCE) == 0
    assert len(waited) == 1 and str(process.pid) in waited[0]
    assert not path.exists()


def test_within_one_process_it_is_held_once(tmp_path):
    path = tmp_path / "x.lock"
    held = try_lock(path)
    with pytest.raises(Locked, match=r"process \d+ on "):
        try_lock(path)
    held.release()
    with locked(path, blocking=False), pytest.raises(Locked):
        try_lock(path)
    assert not is_locked(path) and list(tmp_path.iterdir()) == []


def test_an_error_inside_releases_it(tmp_path):
    with pytest.raises(RuntimeError), locked(tmp_path / "x.lock"):
        raise RuntimeError
    assert not is_locked(tmp_path / "x.lock")


def test_a_lock_that_is_removed_while_it_is_looked_at_is_not_made_again(tmp_path, monkeypatch):
    monkeypatch.setattr(Path, "exists", lambda path: True)
    assert not is_locked(tmp_path / "x.lock") and list(tmp_path.iterdir()) == []


def test_where_no_lock_can_be_nothing_is_locked(tmp_path):
    (tmp_path / "file").touch()
    assert not is_locked(tmp_path) and not is_locked(tmp_path / "file" / "x.lock")


LOOK = """
from pathlib import Path
from ragen.store.lock import is_locked
print(is_locked(Path(FILE)))
"""


def test_a_lock_that_cannot_be_written_can_be_looked_at(nursery, holder):
    path, process = holder
    path.chmod(0o444)
    code = LOOK.replace("FILE", repr(str(path)))
    assert nursery.run(code=code, obey_permissions=True).out == "True\n"
    process.kill()
    process.wait(PATIENCE)
    assert nursery.run(code=code, obey_permissions=True).out == "False\n"


def test_its_directory_is_made_where_it_can_be(tmp_path):
    with locked(tmp_path / "new" / "x.lock"):
        assert (tmp_path / "new").is_dir()
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        try_lock(tmp_path / "file" / "x.lock")


def test_a_filesystem_without_locks_gets_no_marker_files(tmp_path, monkeypatch):
    """They would outlive a killed process."""
    import filelock._unix

    def unsupported(descriptor):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(filelock._unix, "_lock_fd_nonblocking", unsupported)
    with pytest.raises(OSError, match="not implemented"):
        lock.try_lock(tmp_path / "x.lock")


COUNT = """
import time
from pathlib import Path
from ragen.store.lock import locked
file = Path(FILE)
for _ in range(40):
    with locked(file.with_suffix(".lock")):
        number = int(file.read_text())
        time.sleep(0.0005)
        file.write_text(str(number + 1))
"""


def test_many_processes_take_turns(nursery, tmp_path):
    (tmp_path / "count").write_text("0")
    code = COUNT.replace("FILE", repr(str(tmp_path / "count")))
    ended = [child.end() for child in [nursery.start(code=code) for _ in range(4)]]
    assert [one.status for one in ended] == [0] * 4, ended
    assert (tmp_path / "count").read_text() == "160"
