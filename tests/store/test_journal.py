"""The journal of an evaluation: what was finished stays, whatever happens to the process."""

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import started

from ragen.errors import ConfigError
from ragen.store.journal import Journal

SETTING = {"model": "pocket", "seed": 123, "sampling": {"temperature": 0.5, "top_p": 1.0}}
KEY = ("Sokoban", 123, 0, 1)


def test_what_was_written_is_there_again(tmp_path):
    with Journal(tmp_path / "out", SETTING).opened() as journal:
        journal.append(KEY, {"success": True})
        journal.append(("Sokoban", 124, 1, 0), {"success": False})
    assert json.loads(journal.path.read_text().splitlines()[0]) == SETTING
    with Journal(tmp_path / "out", dict(reversed(SETTING.items()))).opened() as again:
        assert again.path == journal.path and again.records == journal.records and len(again.records) == 2
    with Journal(tmp_path / "out", SETTING | {"seed": 7}).opened() as other:
        assert other.path != journal.path and other.records == {}
    with Journal(tmp_path / "out", SETTING).opened(fresh=True) as fresh:
        assert fresh.records == {}
    for one in (journal, other):
        one.remove()
    assert list((tmp_path / "out").iterdir()) == []


def test_the_name_of_a_journal_stays_the_same_between_versions(tmp_path):
    """A hash of the setting as sorted JSON: an evaluation that an older version began is resumed."""
    assert Journal(tmp_path, SETTING).path.name == ".journal-c0f05ccf5a77dc57.jsonl"


def test_lines_that_are_not_valid_are_played_again(tmp_path):
    with Journal(tmp_path, SETTING).opened() as journal:
        journal.append(KEY, {"success": True})
    with journal.path.open("ab") as file:
        file.write(b'{"place": 3, "record": {}}\n{"place": ["Sokoban", 1, 1, 1]}\nnull\n{"place": ["Sok')
    with Journal(tmp_path, SETTING).opened() as again:
        assert again.records == {KEY: {"success": True}}
        again.append(("Sokoban", 1, 1, 1), {})
    with Journal(tmp_path, SETTING).opened() as last:
        assert len(last.records) == 2


@pytest.mark.parametrize("content", ["{}\n", '{"place": ["Sokoban", 1, 1, 1], "record": {}}\n'])
def test_another_file_under_its_name_is_refused(tmp_path, content):
    journal = Journal(tmp_path, SETTING)
    journal.path.write_text(content)
    with pytest.raises(ConfigError, match="is not a journal of this evaluation"), journal.opened():
        pass


def test_a_second_process_is_refused_and_a_killed_one_is_not_waited_for(tmp_path):
    code = (
        "import json, sys\nfrom ragen.store.journal import Journal\n"
        "with Journal(sys.argv[1], json.loads(sys.argv[2])).opened() as journal:\n"
        "    journal.append(('Sokoban', 123, 0, 1), {})\n    print('open', flush=True)\n    sys.stdin.read()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path), json.dumps(SETTING)]
    with started(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "open\n"
        refused = pytest.raises(ConfigError, match=rf"process {process.pid} .* is running the same evaluation")
        with refused, Journal(tmp_path, SETTING).opened():
            pass
    with Journal(tmp_path, SETTING).opened() as journal:
        assert list(journal.records) == [KEY]


def test_threads_write_whole_lines(tmp_path):
    with Journal(tmp_path, SETTING).opened() as journal, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: journal.append(("Sokoban", seed, 0, 0), {"text": "x" * 5000}), range(40)))
    with Journal(tmp_path, SETTING).opened() as again:
        assert len(again.records) == 40
