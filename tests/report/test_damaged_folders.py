"""No reader of a run folder ends with a traceback, whatever the folder holds: it shows what it can, or says in one line
which file is damaged and what to do. A list loses at most the damaged run, and marks it.
"""

import gzip
import json
import os
import random

import pytest
import yaml
from made_up_runs import make_checkpoint, make_groups, validation_metrics

from ragen.cli import main
from ragen.config.compose import resolve
from ragen.store import json_lines
from ragen.store.run_folder import RunFolder

TAG = "CoordSokoban"
GRADIENTS = {
    f"grad_norm/{name}/{key}": value
    for name in ("all", "bucket_1", "bucket_2")
    for key, value in {"task": 1.5, "entropy": 0.1, "reward_std_mean": 0.5, "num_groups": 2.0}.items()
}


def write_run(path, seed=1):
    """A small run with every kind of file."""
    folder = RunFolder(path)
    words = ["sokoban", "model_path=pocket", f"seed.train={seed}", "trainer.total_training_steps=4"]
    folder.write_config(resolve([*words, f"trainer.default_local_dir={path}"], environ={}).config)
    for step in range(4):
        success = validation_metrics(0.2 + step / 10, 0.1, 0.6, random=0.2, optimal=1.0) if step % 3 == 0 else {}
        by_length = {f"val-env/{TAG}/success_len_1-2": 0.5, f"val-env/{TAG}/num_len_1-2": 20} if success else {}
        measured = {"train/CoordSokoban/success": 0.3, "actor/entropy": 0.4, "timing_s/step": 2.0, "actor/kl_loss": 0.1}
        folder.append_metrics(step, success | by_length | measured | GRADIENTS)
        if success:
            folder.write_episodes(step, "val", make_groups([(100, step > 0), (101, False)]))
    row = {"step": 3, "prefix": "grad_norm", "bucket": "bucket_1", "group_id": 0, "reward_std": 0.5}
    json_lines.append(folder.path / "grad_group_rv_table.jsonl", row)
    make_checkpoint(folder.path, 3)
    folder.write_finished("finished", 3)
    return folder


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("whole") / "run")


FILES = [
    "config.yaml",
    "metrics.jsonl",
    "finished.json",
    "episodes/val-000003.jsonl.gz",
    "grad_group_rv_table.jsonl",
    "latest_checkpointed_iteration.txt",
    "global_step_3/manifest.json",
]
STRANGE = [
    None,
    True,
    "x",
    "\x1b[31m\x9b\u202e",
    -1,
    0,
    1e308,
    -1e308,
    10**400,
    2**70,
    "nan",
    "inf",
    [],
    {},
    [[]],
    {"a": 1},
]
STRANGE += [json.loads("[" * 80 + "]" * 80)]


def content_of(path):
    content = path.read_bytes()
    return gzip.decompress(content) if path.suffix == ".gz" else content


def replace_content(path, content):
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def cut(path, draw):
    content = path.read_bytes()
    path.write_bytes(content[: draw.randrange(len(content))])


def cut_inside(path, draw):
    content = content_of(path)
    replace_content(path, content[: draw.randrange(len(content))])


def flip(path, draw):
    content = bytearray(path.read_bytes())
    for _ in range(draw.choice((1, 1, 5))):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    path.write_bytes(content)


def edit(path, draw):
    """Drop a key of a record, or give it another value, at any depth."""
    content = content_of(path)
    if path.suffix == ".yaml":
        tree = yaml.safe_load(content)
        edit_tree(tree, draw)
        replace_content(path, yaml.safe_dump(tree, sort_keys=False).encode())
        return
    lines = [content] if path.suffix == ".json" else content.splitlines()
    index = draw.randrange(len(lines))
    tree = json.loads(lines[index])
    tree = edit_tree(tree, draw) if isinstance(tree, dict) else draw.choice(STRANGE)
    lines[index] = json.dumps(tree).encode()
    replace_content(path, b"\n".join(lines) + b"\n")


def edit_tree(tree, draw):
    inner = tree
    while True:
        keys = list(inner) if isinstance(inner, dict) else list(range(len(inner)))
        key = draw.choice(keys)
        if isinstance(inner[key], (dict, list)) and inner[key] and draw.random() < 0.7:
            inner = inner[key]
            continue
        if draw.random() < 0.3:
            del inner[key]
        else:
            inner[key] = draw.choice(STRANGE)
        return tree


def fill(path, draw):
    """Something else altogether."""
    nested = draw.choice((b"[", b'{"a":', b"- ", b"{a: ")) * 20_000
    path.write_bytes(
        draw.choice((b"", b"\x00" * 100, b"\xff\xfe", b"null\n", b"[]\n", b'"x"\n', b"{}\n", b"9" * 5000, nested))
    )


def become_directory(path, draw):
    path.unlink()
    path.mkdir()


def loop(path, draw):
    path.unlink()
    path.symlink_to(path.name)


def pipe(path, draw):
    path.unlink()
    os.mkfifo(path)


def remove(path, draw):
    path.unlink()


DAMAGES = [cut, cut, cut_inside, flip, flip, edit, edit, edit, edit, fill, become_directory, loop, pipe, remove]


def copy_of(whole, path):
    """By hard links: damage replaces a file or writes to a copy."""
    for source in whole.path.rglob("*"):
        target = path / source.relative_to(whole.path)
        if source.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(source.read_bytes())
    return RunFolder(path)


def readers(damaged, sound):
    yield "report", str(damaged)
    yield "runs", str(damaged.path.parent), "--sort", "success"
    yield "runs", "--json", str(damaged.path.parent)
    yield "runs", "--compare", str(sound), str(damaged)
    yield "plot", "gradients", str(damaged), "--list-steps"


def all_commands(damaged, sound):
    yield from readers(damaged, sound)
    yield "eval", str(damaged), "--dry-run"
    yield "merge", str(damaged.path / "global_step_3"), "--dry-run"
    words = ["sokoban", "model_path=pocket", "seed.train=1", "trainer.total_training_steps=4"]
    yield "train", *words, f"trainer.default_local_dir={damaged}", "--dry-run"


def check(whole, place, draw, file, damage, chosen, capfd):
    damaged, sound = copy_of(whole, place / "bad"), copy_of(whole, place / "good")
    damage(damaged.path / file, draw)
    for command in chosen(damaged, sound):
        try:
            status = main(command)
        except SystemExit as error:
            status = error.code
        out, err = capfd.readouterr()
        assert status in (0, 2), (command, err)
        assert (status == 2) == bool(err) or status == 0, (command, err)
        assert not set(out + err) & {"\x1b", "\x9b", "\u202e"}, command
        assert "Traceback" not in err
        if status == 2:
            assert len(err.splitlines()) == 1 and (str(damaged) in err or command[0] in ("eval", "merge")), err
        if command[0] == "runs" and "--compare" not in command:
            assert status == 0 and "good" in out and "bad" in out, (out, err)


def draw_damage(number):
    draw = random.Random(number)
    return draw, FILES[number % len(FILES)], draw.choice(DAMAGES)


@pytest.mark.parametrize("number", range(14))
def test_a_sample_of_damages(whole, tmp_path, capfd, number):
    check(whole, tmp_path, *draw_damage(number), readers, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(0, 700, 100))
def test_many_damages(whole, tmp_path, capfd, start):
    for number in range(start, start + 100):
        chosen = all_commands if number % 10 == 0 else readers
        check(whole, tmp_path / str(number), *draw_damage(number), chosen, capfd)


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_every_cut(whole, tmp_path, capfd, file):
    """At up to a hundred places."""
    content = (whole.path / file).read_bytes()
    for size in sorted({round(part * len(content) / 100) for part in range(100)}):

        def cut_here(path, draw, size=size):
            path.write_bytes(content[:size])

        check(whole, tmp_path / str(size), random.Random(0), file, cut_here, readers, capfd)


@pytest.mark.parametrize("place", ["/", ".", "/dev/null"])
def test_a_place_that_is_no_run(place, tmp_path, monkeypatch, capfd):
    monkeypatch.chdir(tmp_path)
    assert main(["report", place]) == 2
    assert f"{place}: not a run directory" in capfd.readouterr().err
