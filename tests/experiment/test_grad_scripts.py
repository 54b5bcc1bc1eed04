"""The two gradient-analysis commands: names, paths and settings as published, and which checkpoint a probe takes."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
from dry_runs import dry_run, effective, resolve_once, seed_text

from ragen.cli import main
from ragen.experiment.expand import expand
from ragen.experiment.plan import Options, overrides_on
from ragen.experiment.scheduler import Sweep
from ragen.store.manifest import Manifest, file_sum, write_manifest

pytestmark = pytest.mark.usefixtures("resolved_once")

TRAIN = "bash scripts/runs/run_sokoban_ppo_filter_grad_analysis.sh"
PROBE = "bash scripts/runs/run_sokoban_ppo_filter_grad_analysis_probe_ckpt.sh"
RUNS = "model_saving/gradient_analysis/sokoban/PPO/filter"
NAME = "sokoban-PPO-filter-topp09-Qwen2.5-3B-train8x16-analysis128x16-grad-every50"
POCKET = NAME.replace("Qwen2.5-3B", "pocket")


def only(command: str) -> dict:
    done = dry_run.__wrapped__(command)  # what is on disk differs from test to test
    assert done.status == 0, done.errors
    (one,) = done.runs
    return one


def save(folder: str, step: int, age: int = 0) -> str:
    """A whole checkpoint of one file, `age` seconds old."""
    path = Path(folder, f"global_step_{step}")
    file = path / "actor/model.safetensors"
    file.parent.mkdir(parents=True)
    file.write_bytes(b"weights")
    files = {"actor/model.safetensors": file_sum(file)}
    write_manifest(path, Manifest(step, {"actor": ["model"]}, files=files))
    os.utime(path, (1e9 - age, 1e9 - age))
    return str(path)


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


# --- as published -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("typed", "algo"), [("", "PPO"), ("--algo PPO", "PPO"), ("--algo=grpo", "GRPO")])
def test_training_is_as_published(typed, algo):
    one = only(f"{TRAIN} --gpus 0,1,2,3 {typed}")
    name = NAME.replace("PPO", algo)
    assert one["name"] == effective(one)["trainer.experiment_name"] == name
    assert one["log"] == f"logs/gradient_analysis_sokoban_Qwen2.5-3B/{name}.log"
    assert one["checkpoints"] == f"model_saving/gradient_analysis/sokoban/{algo}/filter/{name}"
    assert one["wandb_project"] == "ragen_gradient_analysis"
    assert one["start"] == ["--config-name", "_2_sokoban"]
    assert one["slot"] == "0,1,2,3"
    given = effective(one)
    expected = {
        "model_path": "Qwen/Qwen2.5-3B",
        "trainer.n_gpus_per_node": "4",
        "trainer.total_training_steps": "101",
        "trainer.save_freq": "100",
        "trainer.val_before_train": "True",
        "trainer.test_freq": "10",
        "trainer.gradient_analysis_every": "50",
        "trainer.exit_after_gradient_analysis": "False",
        "actor_rollout_ref.actor.use_kl_loss": "False",
        "ray_kwargs.ray_init.num_cpus": "16",
        "actor_rollout_ref.rollout.gpu_memory_utilization": "0.3",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": "4",
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model]",
    }
    assert expected.items() <= given.items()
    config = resolve_once(words_of(one), "_2_sokoban").config
    assert config.algorithm.adv_estimator == {"PPO": "gae", "GRPO": "grpo"}[algo]
    aggregation = {"PPO": "token-mean", "GRPO": "seq-mean-token-mean"}[algo]
    assert config.actor_rollout_ref.actor.loss_agg_mode == aggregation
    assert ("algorithm.norm_adv_by_std_in_grpo" in given) == (algo == "GRPO")


def words_of(one: dict) -> list[str]:
    return one["overrides"]


def test_what_both_have_in_common_is_as_published():
    """The bullets under "Common Notes", word for word."""
    notes = seed_text("003").split("Common Notes")[1]
    listed = dict(re.findall(r"((?:es_manager|trainer|actor_rollout_ref)\.[\w.]+)=([\w.]+?)(?:,|\s|$)", notes))
    assert len(listed) == 13
    for command in (TRAIN, PROBE):
        given = effective(only(f"{command} --gpus 0"))
        assert {key: given[key] for key in listed} == listed


@pytest.mark.parametrize("command", [TRAIN, PROBE])
def test_documented_options_take_both_forms_and_their_defaults_change_nothing(command):
    half = seed_text("003").split("2. Checkpoint Probe")[command == PROBE]
    documented = dict(re.findall(r"(--[\w-]+) \(default: ([\d.]+)\)", half))
    documented |= {"--algo": "PPO"}
    assert len(documented) == (7 if command == TRAIN else 6)
    plain = only(f"{command} --gpus 0,1")
    for form in ("{} {}", "{}={}"):
        assert only(f"{command} --gpus=0,1 {' '.join(form.format(*pair) for pair in documented.items())}") == plain


@pytest.mark.parametrize(("flag", "word", "validates"), [("", "noval", "False"), ("--with-val", "withval", "True")])
def test_the_probe_is_as_published(flag, word, validates, elsewhere):
    one = only(f"{PROBE} --gpus 0,1 --algo grpo --checkpoint-step 51 {flag}")
    name = f"sokoban-GRPO-filter-topp09-Qwen2.5-3B-probe-ckpt51-{word}-kl_and_entropy"
    assert one["name"] == name
    assert one["log"] == f"logs/gradient_analysis_probe_sokoban_Qwen2.5-3B/{name}.log"
    assert one["checkpoints"] == f"model_saving/gradient_analysis_probe/sokoban/GRPO/filter/{name}"
    assert one["wandb_project"] == "ragen_gradient_analysis_probe"
    train = NAME.replace("PPO", "GRPO")
    expected = {
        "trainer.resume_mode": "resume_path",
        "trainer.resume_from_path": f"model_saving/gradient_analysis/sokoban/GRPO/filter/{train}/global_step_51",
        "trainer.total_training_steps": "51",
        "trainer.save_freq": "-1",
        "trainer.test_freq": "0",
        "trainer.val_before_train": validates,
        "trainer.gradient_analysis_every": "1",
        "trainer.gradient_analysis_only": "True",
        "trainer.exit_after_gradient_analysis": "True",
        "actor_rollout_ref.actor.use_kl_loss": "True",
        "actor_rollout_ref.actor.kl_loss_coef": "0.001",
        "actor_rollout_ref.actor.entropy_coeff": "0.001",
        "trainer.n_gpus_per_node": "2",
    }
    assert expected.items() <= effective(one).items()


# --- names, devices, overrides ------------------------------------------------------------------------------------


def test_names_follow_the_config_in_force():
    typed = "es_manager.train.env_groups=2 es_manager.train.group_size=4 trainer.gradient_analysis_env_groups=6"
    more = "trainer.gradient_analysis_every=5 ppo_mini_batch_size=8 actor_rollout_ref.rollout.rollout_filter_value=0.75"
    one = only(f"{TRAIN} --model pocket --gpus cpu -- {typed} {more}")
    assert one["name"] == "sokoban-PPO-filter-topp075-pocket-train2x4-analysis6x16-grad-every5"
    assert one["checkpoints"] == f"{RUNS}/{one['name']}"


def test_an_analysis_without_a_batch_of_its_own_has_the_shape_of_training():
    empty = "trainer.gradient_analysis_env_groups=null trainer.gradient_analysis_group_size=null"
    assert "-train8x16-analysis8x16-" in only(f"{TRAIN} --gpus 0 -- {empty}")["name"]


def test_another_filter_has_another_name():
    words = (
        "actor_rollout_ref.rollout.rollout_filter_strategy=top_k actor_rollout_ref.rollout.rollout_filter_value=0.25"
    )
    assert "-filter-topk025-" in only(f"{TRAIN} --gpus 0 -- {words}")["name"]


def test_one_run_takes_all_devices(monkeypatch):
    monkeypatch.setattr("ragen.experiment.devices.discover", lambda: ("0", "1", "2"))
    found = only(TRAIN)
    assert found["slot"] == "0,1,2" and effective(found)["trainer.n_gpus_per_node"] == "3"
    assert only(f"{TRAIN} --gpus 6,7")["slot"] == "6,7"
    on_cpu = only(f"{TRAIN} --gpus cpu,cpu --model pocket")
    assert on_cpu["slot"] == "cpu" and effective(on_cpu)["trainer.n_gpus_per_node"] == "1"


def test_repetitions_one_after_the_other():
    done = dry_run.__wrapped__(f"{TRAIN} --gpus 0,1 --seeds 2")
    assert done.names == [f"{NAME}-s0", f"{NAME}-s1"]
    assert {one["slot"] for one in done.runs} == {"0,1"}


@pytest.mark.parametrize(
    ("command", "message"),
    {
        f"{TRAIN} --algo DAPO": "--algo DAPO: unknown: one of PPO, GRPO",
        f"{TRAIN} --ppo-micro-batch-size-per-gpu 0": "--ppo-micro-batch-size-per-gpu 0: must be at least 1",
        f"{TRAIN} --ray-num-cpus none": "--ray-num-cpus none: takes a whole number",
        f"{TRAIN} --gpus-per-exp 2": "unknown option --gpus-per-exp",
        f"{TRAIN} --ray-address here:6379": "--ray-address: this experiment takes all GPUs for one run",
        f"{PROBE} --gpus 0 --checkpoint-step -1": "--checkpoint-step -1: must be 0 or more",
        f"{PROBE} --gpus 0 --resume-from-path runs/last": "runs/last: must name a directory global_step_<N>",
        f"{PROBE} --gpus 0 --save-freq 5": "unknown option --save-freq",
    }.items(),
)
def test_refused_with_one_message(command, message):
    done = dry_run.__wrapped__(command)
    assert (done.status, done.runs) == (2, [])
    assert message in done.errors


def test_steps_of_a_probe_are_said_to_do_nothing(elsewhere):
    done = dry_run.__wrapped__(f"{PROBE} --gpus 0 --steps 5")
    assert "note: --steps 5 has no effect: nothing is trained" in done.errors
    assert effective(done.runs[0])["trainer.total_training_steps"] == "101"


# --- which checkpoint ---------------------------------------------------------------------------------------------


def test_the_newest_run_that_holds_the_step(elsewhere):
    save(f"{RUNS}/{POCKET}", 101, age=50)
    newest = save(f"{RUNS}/{POCKET}-2", 101, age=10)
    save(f"{RUNS}/{POCKET}-3", 51)  # newer, another step
    save(f"{RUNS}/{NAME}", 101)  # newer, another model
    save(f"{RUNS}/{POCKET.replace('topp09', 'topp05')}", 101)  # newer, another filter
    done = dry_run.__wrapped__(f"{PROBE} --model pocket --gpus cpu")
    assert effective(done.runs[0])["trainer.resume_from_path"] == newest
    assert f"note: checkpoint: {newest}\n" in done.errors and "missing" not in done.runs[0]


def test_a_run_of_another_shape_is_found_too(elsewhere):
    path = save(f"{RUNS}/{POCKET.replace('train8x16-analysis128x16', 'train2x4-analysis6x4')}", 51)
    one = only(f"{PROBE} --model pocket --gpus cpu --checkpoint-step 51")
    assert effective(one)["trainer.resume_from_path"] == path


def test_a_damaged_checkpoint_is_not_taken(elsewhere):
    whole = save(f"{RUNS}/{POCKET}", 101, age=50)
    Path(save(f"{RUNS}/{POCKET}-2", 101), "actor/model.safetensors").write_bytes(b"")
    one = only(f"{PROBE} --model pocket --gpus cpu")
    assert effective(one)["trainer.resume_from_path"] == whole


def test_a_root_and_a_path(elsewhere):
    path = save("mine", 7)
    save(f"{RUNS}/{POCKET}", 101)
    command = f"{PROBE} --model pocket --gpus cpu"
    assert effective(only(f"{command} --checkpoint-root mine --checkpoint-step 7"))["trainer.resume_from_path"] == path
    named = only(f"{command} --checkpoint-root {RUNS} --checkpoint-step 3 --resume-from-path=mine/global_step_7/")
    assert effective(named)["trainer.resume_from_path"] == path  # overrides root and step
    assert "-probe-ckpt7-" in named["name"] and effective(named)["trainer.total_training_steps"] == "7"


def test_step_zero_is_one_step_of_training_at_most(elsewhere):
    save("mine", 0)
    one = only(f"{PROBE} --model pocket --gpus cpu --checkpoint-root mine --checkpoint-step 0")
    assert "-probe-ckpt0-" in one["name"] and effective(one)["trainer.total_training_steps"] == "1"


def test_relative_paths_are_meant_from_where_the_user_is(elsewhere, monkeypatch):
    (elsewhere / "root").mkdir()
    monkeypatch.chdir(elsewhere / "root")
    outside, inside = save(str(elsewhere / "mine"), 7), save("model_saving/run", 8)
    monkeypatch.setenv("RAGEN_CALLER_DIR", str(elsewhere))
    one = only(f"{PROBE} --gpus 0 --resume-from-path mine/global_step_7")
    assert effective(one)["trainer.resume_from_path"] == outside
    monkeypatch.setenv("RAGEN_CALLER_DIR", str(elsewhere / "root"))
    one = only(f"{PROBE} --gpus 0 --resume-from-path model_saving/run/global_step_8")
    assert effective(one)["trainer.resume_from_path"] == inside


def test_a_checkpoint_that_is_not_there_lists_those_that_are(elsewhere, capsys):
    there = [save(f"{RUNS}/{POCKET}", 1), save(f"{RUNS}/{POCKET}", 51), save(f"{RUNS}/{POCKET}-2", 101)]
    words = ["sweep", "grad_analysis_probe", "--model", "pocket", "--gpus", "cpu", "--checkpoint-step", "50"]
    assert main(words) == 2
    said = capsys.readouterr().err
    assert "holds a whole global_step_50; there are\n  " + "\n  ".join(there) in said
    assert "bash scripts/runs/run_sokoban_ppo_filter_grad_analysis.sh --algo PPO --model pocket" in said
    done = dry_run.__wrapped__(f"{PROBE} --model pocket --gpus cpu --checkpoint-step 50")
    assert done.status == 0 and there[0] in done.runs[0]["missing"] and "note: no run " in done.errors
    assert effective(done.runs[0])["trainer.resume_from_path"] == f"{RUNS}/{POCKET}/global_step_50"


def test_a_named_checkpoint_that_is_not_there_lists_its_siblings(elsewhere, capsys):
    there = [save("mine", 9), save("mine", 10)]
    start = ["sweep", "grad_analysis_probe", "--gpus", "cpu"]
    assert main([*start, "--resume-from-path", "mine/global_step_11"]) == 2
    assert f"mine/global_step_11 is not there; there are\n  {there[0]}\n  {there[1]}\n" in capsys.readouterr().err
    assert main([*start, "--checkpoint-root", "other"]) == 2
    assert "other/global_step_101 is not there; other holds no checkpoint" in capsys.readouterr().err


# --- the log ------------------------------------------------------------------------------------------------------


def test_a_log_begins_with_what_is_run(elsewhere):
    plan = expand("grad_analysis", Options(gpus=("0", "1"), steps=5))
    (cell,) = plan.cells
    assert len(cell.log_head) == 3
    view = SimpleNamespace(note=print)
    sweep = Sweep(plan, command=None, grace=0.0, log=None, view=view, nodes=None)
    cell.log_path.parent.mkdir(parents=True)
    assert sweep._began_log(cell)
    title, facts, shapes, sizes = cell.log_path.read_text().splitlines()
    assert re.fullmatch(r"=== Gradient analysis: sokoban, PPO, Qwen2\.5-3B: \d{4}-.* ===", title)
    assert facts == "task=sokoban | algo=PPO | filter=topp09 | model=Qwen/Qwen2.5-3B | steps=5 | gpus=0,1"
    assert shapes == "train_batch=8x16 | analysis_batch=128x16 | grad_every=50 | save_freq=100"
    assert sizes == "ppo_micro_batch_size_per_gpu=4 | log_prob_micro_batch_size_per_gpu=4"
    plain = expand("kl_sweep", Options(gpus=("0",))).cells[0]
    assert not sweep._began_log(plain) and not plain.log_path.exists()


def test_devices_are_in_the_overrides_of_a_run():
    (cell,) = expand("grad_analysis", Options(gpus=("2", "3"))).cells
    assert overrides_on(cell, ("2", "3"))[-1] == "system.CUDA_VISIBLE_DEVICES='2,3'"
    assert cell.num_gpus == 2


def test_checkpoints_of_another_model_are_named(elsewhere, capsys):
    """Nothing of the wanted model lies there, but something of another one does."""
    there = [save(f"{RUNS}/{POCKET}", 51), save(f"{RUNS}/{POCKET}", 101)]
    assert main(["sweep", "grad_analysis_probe", "--model", "mine/Other-1B", "--gpus", "cpu"]) == 2
    said = capsys.readouterr().err
    assert f"other runs in {RUNS} hold\n  {there[0]}\n  {there[1]}\n" in said and "holds no checkpoint" not in said
    assert "--resume-from-path" in said and "--model" in said
    assert main(["sweep", "grad_analysis_probe", "--gpus", "cpu", "--checkpoint-root", RUNS]) == 2
    assert f"other runs in {RUNS} hold\n  {there[0]}\n" in capsys.readouterr().err
