"""Numbered names and rotated logs."""

from itertools import islice
from pathlib import Path

from ragen.store.free_name import next_free, numbered, rotate


def test_numbered():
    assert [path.name for path in islice(numbered(Path("runs/test")), 3)] == ["test", "test-2", "test-3"]
    assert [path.name for path in islice(numbered(Path("v1.5")), 2)] == ["v1.5", "v1.5-2"]
    names = islice(numbered(Path("out/x.jsonl"), separator="_", before_suffix=True), 3)
    assert list(names) == [Path("out/x.jsonl"), Path("out/x_2.jsonl"), Path("out/x_3.jsonl")]


def test_next_free(tmp_path):
    base = tmp_path / "sft"
    for expected in ("sft", "sft-2", "sft-3"):
        found = next_free(base)
        assert found.name == expected
        found.mkdir()
    (tmp_path / "sft-2").rmdir()
    assert next_free(base).name == "sft-2"


def test_rotate_keeps_all_and_the_newest_is_one(tmp_path):
    log = tmp_path / "x.log"
    for number in range(3):
        log.write_text(str(number))
        rotate(log)
        assert not log.exists()
    assert [(tmp_path / f"x.log.{number}").read_text() for number in (1, 2, 3)] == ["2", "1", "0"]


def test_rotate_fills_a_gap_first(tmp_path):
    for name in ("x.log", "x.log.2"):
        (tmp_path / name).write_text(name)
    rotate(tmp_path / "x.log")
    assert (tmp_path / "x.log.1").read_text() == "x.log" and (tmp_path / "x.log.2").read_text() == "x.log.2"
