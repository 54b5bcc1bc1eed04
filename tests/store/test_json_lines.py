"""JSON lines: whole lines only, whatever a killed process has left."""

import json

import pytest

from ragen.store.json_lines import append, read, rewind, write


@pytest.fixture
def path(tmp_path):
    return tmp_path / "new" / "lines.jsonl"


def test_lines_come_back(path):
    assert read(path) == ([], [])
    append(path, {"step": 1}, {"step": 2})
    append(path, {"step": 3, "text": "√ \n 汉字 \ud800"})
    assert read(path) == ([{"step": 1}, {"step": 2}, {"step": 3, "text": "√ \n 汉字 \ud800"}], [])


@pytest.mark.parametrize("whole", [b"", b'{"step": 1}\n', b'{"step": 1}\n{"step": 2}\n'])
def test_a_torn_line_is_skipped_and_does_not_swallow_the_next_one(path, whole):
    path.parent.mkdir()
    path.write_bytes(whole + b'{"step": 9, "te')
    records, (note,) = read(path)
    assert len(records) == whole.count(b"\n") and "the last line of lines.jsonl is torn" in note
    append(path, {"step": 7})
    assert read(path) == ([*records, {"step": 7}], [])


def test_every_cut_of_a_file_reads_as_its_whole_lines(path):
    append(path, *({"step": step, "text": "x" * step} for step in range(4)))
    content = path.read_bytes()
    for size in range(len(content)):
        path.write_bytes(content[:size])
        records, skipped = read(path)
        assert [record["step"] for record in records] == list(range(content[:size].count(b"\n")))
        assert len(skipped) == (size > 0 and content[size - 1 : size] != b"\n")


def test_lines_that_are_not_valid_are_named(path):
    path.parent.mkdir()
    path.write_bytes(b'{"step": 1}\n\xff\xfe\n[2]\n\n{"step": "x"}\n{"step": 5}\n')
    records, skipped = read(path, lambda record: isinstance(record["step"], int))
    assert records == [{"step": 1}, {"step": 5}]
    assert [note.partition(" of ")[0] for note in skipped] == ["line 2", "line 3", "line 5"]


def test_rewound_to_a_step(path):
    rewind(path, lambda record: True)
    assert not path.exists()
    append(path, *({"step": step} for step in (1, 2, 3, 2)))
    with path.open("ab") as file:
        file.write(b'broken\n{"step": 1}')
    rewind(path, lambda record: record["step"] <= 2)
    assert [record["step"] for record in read(path).records] == [1, 2, 2]
    rewind(path, lambda record: record["step"] <= 2, is_last=lambda record: record["step"] == 2)
    assert path.read_bytes() == b'{"step": 1}\n{"step": 2}\n'


def test_a_whole_file_is_replaced_and_readable(path):
    write(path, [{"a": 1}, {"a": 2}])
    write(path, [{"text": "汉字 \ud800"}])
    assert json.loads(path.read_text(encoding="utf-8")) == {"text": "汉字 ?"}
    assert list(path.parent.iterdir()) == [path]
