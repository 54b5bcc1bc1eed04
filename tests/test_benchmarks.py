"""The GPU benchmarks and studies start, at the size of a CPU: an hour with a GPU is not for finding typing errors."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
TINY = {
    "collapse": ("--shape tiny --rounds 1", "x the floor with attention"),
    "memory": ("--only tiny", "kept during updates"),
    "overlap": ("--shape tiny --rows 4 --prompts 1", "on two streams"),
    "schedule": ("--rounds 1 --groups 2 --size 4 --reply 20", "ragged at"),
    "grpo_step": ("--model pocket --groups 2 --size 2 --reply 4 --rounds 1 --tries 0 --no-peer", "ours: MFU"),
    "ppo_step": ("--model pocket --groups 2 --size 2 --reply 4 --steps 2 --only reference", "step 2: gen"),
}


def run(script, *arguments):
    environ = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, str(ROOT / script), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=500)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize("name", TINY)
def test_a_gpu_benchmark_runs_on_a_cpu(name):
    arguments, printed = TINY[name]
    assert printed in run(f"benchmarks/gpu/{name}.py", *arguments.split())


def test_the_table_of_two_checkouts(tmp_path):
    for name, factor in (("old", 3.0), ("new", 1.0)):
        (tmp_path / name).mkdir()
        parts = {f"timing_s/{part}": factor for part in ("gen", "old_log_prob", "update_actor", "step")}
        gaps = {
            "rollout/log_prob_diff_mean": 0.01,
            "rollout/log_prob_diff_p999": 0.1,
            "rollout/sampler_learner_kl": 1e-4,
        }
        rows = [{"step": step, "train/T/success": 0.5, **parts, **gaps} for step in range(1, 31)]
        rows[-1]["val-env/T/success"] = 0.4
        (tmp_path / name / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    printed = run("scripts/studies/two_checkouts.py", "table", str(tmp_path))
    assert "old / new, median time of a step: 3.00" in printed
    assert "| new | 1.00 | 1.00 | 1.00 | 1.00 | 40.0 | 50.0 |" in printed
    assert "| new | 26–30 | 1.00e-02 | 1.00e-01 | 1.00e-04 |" in printed
