"""Kill -9 in fine-tuning: the same command ends like one that was never killed."""

import random

import pytest
from kills import files, kill_once
from small import WORDS
from without_clock import metrics_without_clock

from ragen.store.lineage import MERGED

COMMAND = ["train", "sokoban", *WORDS, "env.env_kwargs.cell_format=plain"]
AIMS = ("update", "checkpoint", "merging", "validation", None)


@pytest.mark.slow
def test_fine_tuning_survives(nursery, tmp_path):
    def command(name):
        return [*COMMAND, f"sft.output_dir={tmp_path / name}"]

    assert nursery.run(*command("unbroken")).status == 0
    drawn, hit, names = random.Random(7), [], []
    while len(hit) < 10:
        names.append(f"killed-{len(names)}")
        is_done = False
        while len(hit) < 10 and not is_done:
            aim = AIMS[len(hit) % len(AIMS)]
            found = kill_once(nursery, command(names[-1]), aim, 1, drawn.uniform(0, 2.0 if aim is None else 0.1))
            is_done = found is None
            hit += [] if is_done else [found]
        if not is_done:
            assert nursery.run(*command(names[-1])).status == 0
    for name in names:
        folders = [tmp_path / name, tmp_path / "unbroken"]
        merged, run = ([folder / part for folder in folders] for part in (MERGED, "lora_weights"))
        assert files(merged[0], "*.safetensors") == files(merged[1], "*.safetensors")
        assert metrics_without_clock(run[0]) == metrics_without_clock(run[1])
        assert not (tmp_path / f"{name}-2").exists() and not list(folders[0].rglob("*.part"))
    print(f"{len(hit)} kills: {hit}")
