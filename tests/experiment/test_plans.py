"""Expanding an experiment: values, names, labels, seeds, batches, slots, and what is refused."""

import json
import os
import re
import shlex
import subprocess
import sys
from decimal import Decimal
from pathlib import Path

import pytest
from dry_runs import ROOT, dry_run, effective, resolve_once
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ragen.errors import ConfigError
from ragen.experiment import devices, spec
from ragen.experiment.check import check
from ragen.experiment.cluster import Device
from ragen.experiment.command import read_options
from ragen.experiment.expand import expand, plans
from ragen.experiment.plan import Options, overrides_on
from ragen.experiment.template import make

pytestmark = pytest.mark.usefixtures("resolved_once")

SMALL = (
    "es_manager.train.env_groups=2",
    "es_manager.train.group_size=4",
    "es_manager.val.env_groups=4",
    "ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "critic.ppo_mini_batch_size=8",
)


def kl(values: str, **others) -> Options:
    return Options(settings=(("kl", values),), **others)


# --- values -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "text", "template", "expected"),
    [
        ("coefficient", "0.001", "{v} {v:label} {v:on}", "0.001 0001 True"),
        ("coefficient", "0.00", "{v} {v:label} {v:on}", "0.00 000 False"),
        ("coefficient", "1E-3", "{v:label} {v:on}", "1e-3 True"),
        ("bool", "yes", "{v}", "True"),
        ("bool", "0", "{v}", "False"),
        ("model", "Qwen/Qwen2.5-0.5B-Instruct", "{v:short} {v:size}", "0_5B_instruct 0.5B"),
        ("model", "Qwen/Qwen2.5-0.5B-Instruct", "{v:name} {v}", "Qwen2.5-0.5B-Instruct Qwen/Qwen2.5-0.5B-Instruct"),
        ("model", "Qwen2.5-3B", "{v:path} {v:full}", "Qwen/Qwen2.5-3B Qwen2.5-3B"),
        ("model", "meta-llama/Llama-3.2-3B", "{v:path} {v:full}", "meta-llama/Llama-3.2-3B meta-llama__Llama-3.2-3B"),
        ("model", "pocket", "{v:path} {v:size} {v:short}", "pocket pocket pocket"),
        ("slip", "50", "{v:ratio} {v:success} {v:label}", "0.5 0.5 slip0p5"),
        ("slip", "2", "{v:ratio} {v:success} {v:label}", "0.02 0.98 slip0p02"),
        ("slip", "1%", "{v:ratio} {v:success} {v:label}", "0.01 0.99 slip0p01"),
        ("slip", "0.25", "{v:ratio} {v:success} {v:label}", "0.25 0.75 slip0p25"),
        ("slip", "100", "{v:ratio} {v:success} {v:label}", "1 0 slip1"),
        ("slip", "0", "{v:ratio} {v:success} {v:label}", "0 1 slip0"),
    ],
)  # fmt: skip
def test_values(kind, text, template, expected):
    assert template.format(v=make(kind, text, "--opt")) == expected


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("coefficient", "-0.1"), ("coefficient", "nan"), ("coefficient", "inf"), ("coefficient", "1_0"),
        ("coefficient", ""), ("coefficient", "0x1"), ("positive", "0"), ("share", "1.01"), ("share", "0"),
        ("count", "0"), ("count", "1.5"), ("whole", "a"), ("bool", "maybe"), ("word", "a/b"), ("word", "../x"),
        ("model", "a b"), ("model", ""), ("slip", "1"), ("slip", "1.0"), ("slip", "101"), ("slip", "-5"),
    ],
)  # fmt: skip
def test_wrong_values_name_the_option_and_the_value(kind, text):
    with pytest.raises(ConfigError) as error:
        make(kind, text, "--opt")
    assert str(error.value).startswith("--opt ") and text in str(error.value)


coefficients = st.decimals(0, 10, places=3).map(lambda value: f"{value.normalize():f}")


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(coefficients, min_size=1, max_size=6), st.sampled_from(["True", "False"]))
def test_kl_names_against_a_plain_loop(values, include_zero):
    labels = [value.replace(".", "") for value in values]
    options = Options(settings=(("kl", ", ".join(values)), ("include_zero", include_zero)))
    if len(set(labels)) < len(labels):
        with pytest.raises(ConfigError, match="one label"):
            expand("kl_sweep", options)
        return
    plan = expand("kl_sweep", options)
    tag = {"True": "nofilter", "False": "filter_zero"}[include_zero]
    for value, label, cell in zip(values, labels, plan.cells, strict=True):
        assert cell.name == f"sokoban_kl_sweep_{tag}_{label}-Qwen2.5-3B"
        assert cell.label == label
        assert f"actor_rollout_ref.actor.kl_loss_coef={value}" in cell.overrides
        assert f"actor_rollout_ref.actor.use_kl_loss={Decimal(value) != 0}" in cell.overrides
        assert cell.fields == (("kl", value), ("filter", tag), ("include_zero", include_zero))
    assert plan.batches == (tuple(range(len(values))),)
    assert plan.reference == next((label for value, label in zip(values, labels, strict=True) if value == "0"), None)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from("12345"), min_size=1, max_size=6), st.integers(1, 9))
def test_batches_never_span_groups(groups, size):
    plan = expand("smoke_test_for_ke", Options(settings=(("groups", ",".join(groups)), ("max_parallel", str(size)))))
    sizes = {"1": 16, "2": 16, "3": 4, "4": 16, "5": 16}
    expected = []
    for group in sorted(set(groups)):
        left = sizes[group]
        while left:
            expected.append((group, min(size, left)))
            left -= expected[-1][1]
    found = [({plan.cells[index].group for index in batch}, len(batch)) for batch in plan.batches]
    assert found == [({group}, number) for group, number in expected]
    assert [index for batch in plan.batches for index in batch] == list(range(len(plan.cells)))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(1, 12), st.integers(1, 12))
def test_cut(num, size):
    listed = tuple(map(str, range(num)))
    if num % size:
        with pytest.raises(ConfigError, match=f"--gpus-per-exp {size}"):
            devices.check(listed, size)
    else:
        devices.check(listed, size)
        pool = devices.Pool(Device("here", *one) for one in enumerate(listed))
        cut = [pool.take(size, 0.0) for _ in range(num // size)]
        assert pool.take(1, 0.0) is None
        assert tuple(device.name for slot in cut for device in slot) == listed


def test_device_lists():
    assert devices.read(" 3, 1") == ("3", "1")
    assert devices.read("cpu,cpu") == ("cpu", "cpu")
    for text in ("", ",", "0,0", "0,cpu", "x", "-1", "-1,0", "none", "null", "[]"):
        with pytest.raises(ConfigError, match="--gpus"):
            devices.read(text)


@pytest.mark.parametrize(
    ("visible", "typed", "found"),
    [
        (None, "0,1", ("0", "1")), (None, None, None), ("2,3", "0,1", ("2", "3")), ("2,3", "1", ("3",)),
        ("2,3", None, ("2", "3")), ("GPU-a1,MIG-b2", "1,0", ("MIG-b2", "GPU-a1")),
        ("GPU-a1,MIG-b2", "GPU-a", ("GPU-a1",)),
        ("GPU-a1,GPU-a2", None, ("GPU-a1", "GPU-a2")), ("", "cpu,cpu", ("cpu", "cpu")), (" 5 , 4", "0", ("5",)),
    ],
)  # fmt: skip
def test_a_number_is_a_place_in_the_visible_devices(visible, typed, found):
    assert devices.chosen(None if typed is None else devices.read(typed), visible) == found
    if found is not None and typed and typed[0].isdecimal():
        assert devices.read(typed) == tuple(devices.as_typed(found, visible).split(","))


@pytest.mark.parametrize(
    ("visible", "typed", "message"),
    [
        ("2,3", "2,3", "--gpus 2,3: CUDA_VISIBLE_DEVICES=2,3 has no place 2; --gpus counts its entries, 0 to 1"),
        ("2,3", "0,2", "--gpus 0,2: CUDA_VISIBLE_DEVICES=2,3 has no place 2"),
        ("7", "1", "CUDA_VISIBLE_DEVICES=7 has no place 1; --gpus counts its entries, 0"),
        ("2,3", "GPU-x", "CUDA_VISIBLE_DEVICES=2,3 has no device GPU-x"),
        ("GPU-a1,GPU-a2", "GPU-a", "has no device GPU-a"),
        ("GPU-a1,2", "GPU-a1,0", "listed twice"),
        ("", "0", "CUDA_VISIBLE_DEVICES='' hides every GPU"),
        ("-1", None, "CUDA_VISIBLE_DEVICES='-1' hides every GPU"),
        ("a", "0", "variable CUDA_VISIBLE_DEVICES"),
    ],
)
def test_what_is_not_visible_is_refused_with_both_lists(visible, typed, message):
    with pytest.raises(ConfigError) as error:
        devices.chosen(None if typed is None else devices.read(typed), visible)
    assert message in str(error.value)


def test_runs_get_the_visible_devices(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    for words, slots in (("", ["2", "3"]), ("--gpus 1,0", ["3", "2"]), ("--gpus 0,1 --gpus-per-exp 2", ["2,3", "2,3"])):
        done = dry_run.__wrapped__(f"./ragen sweep kl_sweep --kl-values 0,0.1 {words}")
        assert [run["slot"] for run in done.runs] == slots
        assert [effective(run)["system.CUDA_VISIBLE_DEVICES"].strip("'") for run in done.runs] == slots
    refused = dry_run.__wrapped__("./ragen sweep kl_sweep --kl-values 0,0.1 --gpus 2,3")
    assert refused.status == 2 and "CUDA_VISIBLE_DEVICES=2,3" in refused.errors
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert dry_run.__wrapped__("./ragen sweep kl_sweep --kl-values 0 --gpus 6").status == 0, "a dry run needs no device"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    done = dry_run.__wrapped__("./ragen sweep kl_sweep --kl-values 0 --gpus 6")
    assert [run["slot"] for run in done.runs] == ["6"], "a cluster has its own devices"


def test_discovery_counts_what_nvidia_smi_lists(tmp_path, monkeypatch, capsys):
    fake = tmp_path / "nvidia-smi"
    fake.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 (UUID: GPU-a)'\necho 'GPU 1: NVIDIA H100 (UUID: GPU-b)'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert devices.discover() == ("0", "1")
    fake.write_text("#!/bin/sh\nexit 9\n")
    assert devices.discover() == tuple("01234567")
    assert "using 0 to 7" in capsys.readouterr().err


# --- seeds, names, parts ------------------------------------------------------------------------------------------


def test_seeds_pair_the_runs():
    plan = expand("kl_sweep", kl("0,0.01", seeds=3, overrides=("seed.train=7",)))
    assert [cell.name.rpartition("-")[2] for cell in plan.cells] == ["s0", "s1", "s2"] * 2
    assert [cell.label for cell in plan.cells] == ["0-s0", "0-s1", "0-s2", "001-s0", "001-s1", "001-s2"]
    assert [cell.overrides[-1] for cell in plan.cells] == [
        "seed.train=7",
        "seed.train=1000007",
        "seed.train=2000007",
    ] * 2
    assert plan.cells[4].checkpoint_dir == Path(
        "model_saving/kl_sweep_Qwen2.5-3B/001/sokoban_kl_sweep_nofilter_001-Qwen2.5-3B-s1"
    )
    assert plan.cells[4].fields[-1] == ("seed", "1") and plan.summary_fields[-1] == "seed"
    assert plan.reference == "0"


def test_without_seeds_nothing_is_said_about_them():
    plan = expand("kl_sweep", kl("0"))
    assert plan.cells[0].seed is None and "seed" not in plan.summary_fields
    assert not any(word.startswith("seed.") for word in plan.cells[0].overrides)


def test_summary_fields_in_their_documented_order():
    end = ("train_time", "eval_time", "total_time", "wall_time", "gpu", "status")
    assert expand("kl_sweep", Options()).summary_fields == ("kl", "filter", "include_zero", *end)
    assert expand("entropy_sweep", Options()).summary_fields == ("entropy", "filter", "include_zero", *end)
    assert expand("top_p_sweep", Options()).summary_fields == ("value", "include_zero", "filter_value", *end)
    algo = expand("main_table_diff_algo", Options())
    assert algo.summary_fields == ("task", "algo", "filter", "model", "steps", "filter", *end)
    assert algo.cells[0].fields[2] == ("filter", "filter") and algo.cells[0].fields[5] == ("filter", "top_p:0.9")
    smoke = expand("smoke_test_for_ke", Options(settings=(("groups", "4"),)))
    assert smoke.summary_fields == (
        "name", "filter", "kl", "entropy", "collapse", "train_time", "eval_time", "collapse_time",
        "collapse_first_time", "collapse_multi_time", "total_time", "wall_time", "gpu", "status",
    )  # fmt: skip
    assert dict(smoke.cells[0].fields)["collapse"] == "first:True,multi:True,samples:64"


def test_the_model_names_everything():
    plan = expand("top_p_sweep", Options(model="models/mine", settings=(("top_p", "0.9"),)))
    assert plan.cells[0].name == "sokoban_top_p_09-mine"
    assert plan.summary_path == Path("logs/top_p_sweep_mine.log")
    assert "model_path=models/mine" in plan.cells[0].overrides


def test_smoke_follows_the_flags_in_force():
    flags = ("collapse_detection.multi_turn_enabled=False", "collapse_detection.num_samples=8")
    plan = expand("smoke_test_for_ke", Options(settings=(("groups", "3"),), overrides=flags))
    assert plan.cells[0].name == "g3-smoke-ppo-sokoban-topk100-kl0-ent0-low_var_kl-ft"
    assert plan.summary_path.name == "smoke_test_results_3B_low_var_kl_ft.log"
    assert dict(plan.cells[0].fields)["collapse"] == "first:True,multi:False,samples:8"


def test_smoke_counts_groups_of_the_config_in_force():
    settings = (("groups", "3"), ("strategy", "top_k"))
    plan = expand("smoke_test_for_ke", Options(settings=settings, overrides=("es_manager.train.env_groups=100",)))
    counts = [
        effective({"overrides": cell.overrides})["actor_rollout_ref.rollout.rollout_filter_value"]
        for cell in plan.cells
    ]
    assert counts == ["100", "80", "60", "40"]


def test_a_key_by_another_name_is_noticed_where_a_name_counts_on_it():
    settings = (("groups", "3"), ("strategy", "top_k"))
    overrides = ("es_manager={train: {env_groups: 4}}",)
    with pytest.raises(ConfigError, match=r"is built on es_manager.train.env_groups=8, but its config has 4"):
        check(expand("smoke_test_for_ke", Options(settings=settings, overrides=overrides)), dry_run=True)


def test_smoke_is_offline_resumes_and_waits():
    plan = expand("smoke_test_for_ke", Options(settings=(("groups", "3"),)))
    assert (plan.wandb_mode, plan.is_offline, plan.append_summary) == ("offline", True, True)
    assert (plan.options.resume, plan.options.cooldown, plan.options.max_parallel) == (True, 30.0, 8)
    assert plan.headings == {"3": "Group 3: KL=0, entropy=0"}
    plain = expand("kl_sweep", Options())
    assert (plain.wandb_mode, plain.is_offline, plain.append_summary) == (None, False, False)
    assert (plain.options.resume, plain.options.cooldown, plain.options.max_parallel) == (False, 0.0, None)


def test_what_a_resumed_experiment_leaves():
    assert Options().done_statuses == {"success", "early_stopped"}
    assert Options(retry=("early_stopped",)).done_statuses == {"success"}
    smoke = expand("smoke_test_for_ke", Options(settings=(("groups", "3"), ("skip_statuses", "success,fail"))))
    assert smoke.options.done_statuses == {"success", "fail"}


@pytest.mark.parametrize(
    ("variable", "skipped"),
    [
        ('("success")', {"success"}), ("()", set()), ('("success" "early_stopped")', {"success", "early_stopped"}),
        ('("fail")', {"fail"}),
    ],
)  # fmt: skip
def test_the_script_says_what_the_smoke_test_skips(variable, skipped, tmp_path):
    """The variable of the script, as edited by hand, as `ragen sweep` gets it."""
    text = (ROOT / "scripts/runs/smoke_test_for_ke.sh").read_text()
    text = re.sub(r"^SKIP_STATUSES=.*$", f"SKIP_STATUSES={variable}", text, flags=re.MULTILINE)
    (tmp_path / "script.sh").write_text(re.sub(r"^source.*$", "PYTHON=echo", text, flags=re.MULTILINE))
    given = subprocess.run(["bash", tmp_path / "script.sh"], capture_output=True, text=True, check=True).stdout
    words = shlex.split(given)[2:]
    plan = expand("smoke_test_for_ke", read_options(spec.load("smoke_test_for_ke"), words[2:]))
    assert plan.options.done_statuses == skipped


@pytest.mark.parametrize(
    ("only", "names"),
    [
        (("001",), ["001"]), (("0.01",), ["001"]), (("sokoban_kl_sweep_nofilter_0-Qwen2.5-3B",), ["0"]),
        (("0.01", "0"), ["0", "001"]),
    ],
)  # fmt: skip
def test_only_some_runs(only, names):
    assert [cell.label for cell in expand("kl_sweep", kl("0,0.01,0.1", only=only)).cells] == names


def test_only_a_group_of_a_series():
    (plan,) = plans("all_kl_entropy", Options(only=("3",)))
    assert len(plan.cells) == 4 and {cell.group for cell in plan.cells} == {"3"}
    with pytest.raises(ConfigError, match="--only 9: there is no such run"):
        plans("all_kl_entropy", Options(only=("9",)))


def test_another_seed_alone_is_checked_too():
    plan = expand(
        "kl_sweep", kl("0", seeds=2, only=("sokoban_kl_sweep_nofilter_0-Qwen2.5-3B-s1",), overrides=("lora.rank=-1",))
    )
    assert len(plan.cells) == 1
    with pytest.raises(ConfigError, match=r"lora\.rank"):
        check(plan, dry_run=True)


@pytest.mark.parametrize("word", ["trainer.default_local_dir={checkpoints}", "trainer.experiment_name={name}"])
def test_a_run_of_ones_own_that_would_write_elsewhere_is_refused(tmp_path, word):
    text = (ROOT / "docs/experiments.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "lr.yaml").write_text(text.replace(f"  - {word}\n", ""))
    with pytest.raises(ConfigError) as error:
        check(expand(str(tmp_path / "lr.yaml"), Options()), dry_run=True)
    assert word in str(error.value)


def test_number_of_groups_follows_the_users():
    cell = expand("kl_sweep", kl("0", overrides=SMALL)).cells[0]
    assert not any("n_groups" in word for word in cell.overrides)
    config = resolve_once(overrides_on(cell, ("0",)), "_2_sokoban", {}).config
    assert config.es_manager.train.env_configs.n_groups == [2]
    typed = expand("kl_sweep", kl("0", overrides=(SMALL[0], "es_manager.train.env_configs.n_groups=[2]"))).cells[0]
    assert typed.overrides.count("es_manager.train.env_configs.n_groups=[8]") == 1  # the user's comes later and wins


def test_what_follows_a_key_follows_the_users():
    cell = expand("kl_sweep", kl("0", overrides=("ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=4"))).cells[0]
    config = resolve_once(overrides_on(cell, ("0",)), "_2_sokoban", {}).config
    assert (config.actor_rollout_ref.actor.ppo_mini_batch_size, config.critic.ppo_mini_batch_size) == (8, 4)


def test_the_users_word_takes_the_place_of_one_in_the_older_dialect():
    cell = expand("model_scaling", Options(overrides=("es_manager.train.env_groups=6",))).cells[0]
    assert not any(word.startswith("training.train_batch_size=") for word in cell.overrides)
    config = resolve_once((*cell.start, *overrides_on(cell, ("0",))), None, {}).config
    assert config.es_manager.train.env_groups == 6


def test_the_users_project_is_the_one_that_is_shown():
    cell = expand("kl_sweep", kl("0", overrides=("trainer.project_name='mine'",))).cells[0]
    assert cell.wandb_project == "mine"


def test_a_folder_with_a_blank_is_quoted(tmp_path):
    cell = expand("kl_sweep", kl("0", model="/my models/it's/mine")).cells[0]
    config = resolve_once(overrides_on(cell, ("0",)), "_2_sokoban", {}).config
    assert config.model_path == "/my models/it's/mine"


def test_devices_of_a_run():
    cell = expand("kl_sweep", kl("0", gpus=("cpu",))).cells[0]
    assert overrides_on(cell, ("cpu",))[-1] == "system.CUDA_VISIBLE_DEVICES=''"
    assert overrides_on(cell, ("0", "1"))[-1] == "system.CUDA_VISIBLE_DEVICES='0,1'"
    scaling = expand("model_scaling", Options(gpus=("cpu",)))
    assert {cell.num_gpus for cell in scaling.cells} == {1}
    wide = expand("model_scaling", Options(gpus=tuple("01234567"), gpus_per_exp=4))
    assert {cell.num_gpus for cell in wide.cells} == {4}


@pytest.mark.parametrize("name", [name for name in spec.names() if name not in ("hyperparam_search", "all_kl_entropy")])
def test_every_experiment_is_whole(name):
    """Names, logs, results and checkpoints of its runs are all different, and a report can tell them apart."""
    plan = expand(name, Options(gpus=tuple("01234567"), seeds=2))
    for part in ("name", "label", "log_path", "result_path", "checkpoint_dir", "fields"):
        assert len({getattr(cell, part) for cell in plan.cells}) == len(plan.cells), part
    for cell in plan.cells:
        assert cell.log_path.stem == cell.checkpoint_dir.name == cell.name
        assert [field for field, _ in cell.fields[:-1]] == list(plan.summary_fields[: len(cell.fields) - 1])
    assert (ROOT / spec.load(name).script).is_file()


def test_main_table_algorithms_differ_in_what_the_document_says():
    plan = expand(
        "main_table_diff_algo",
        Options(settings=(("task", "frozenlake"), ("filter", "nofilter"), ("algo", "ppo,DAPO,GRPO,drgrpo"))),
    )
    clip = "actor_rollout_ref.actor.clip_ratio_high"
    found = {cell.name.split("-")[1]: effective({"overrides": cell.overrides}) for cell in plan.cells}
    assert (found["PPO"][clip], found["DAPO"][clip]) == ("0.2", "0.28")
    assert clip not in found["GRPO"] and clip not in found["DrGRPO"]
    assert found["DAPO"]["actor_rollout_ref.actor.kl_loss_coef"] == "0.0"
    assert [found[algo]["algorithm.adv_estimator"] for algo in ("PPO", "DAPO", "GRPO", "DrGRPO")] == [
        "gae",
        "gae",
        "grpo",
        "grpo",
    ]
    assert found["DrGRPO"]["algorithm.norm_adv_by_std_in_grpo"] == "False"
    assert found["PPO"]["custom_envs.CoordFrozenLake.env_config.success_rate"] == "1.0"
    assert plan.cells[0].start == ("--config-name", "_3_frozen_lake")


@pytest.mark.parametrize(
    ("name", "setting"),
    [("main_table_diff_size", ("task", "frozenlake")), ("frozen_lake_slipper_rate_sweep", ("slip", "0"))],
)
def test_the_embedded_model_gets_the_board_that_it_knows(name, setting):
    cell = expand(name, Options(model="pocket", gpus=("cpu",), settings=(setting,))).cells[0]
    config = resolve_once(overrides_on(cell, ("cpu",)), "_3_frozen_lake", {}).config
    assert config.es_manager.train.env_configs.tags == ["FrozenLake"]
    assert config.custom_envs["FrozenLake"].env_config["success_rate"] == 1


def test_slip_rates():
    plan = expand("frozen_lake_slipper_rate_sweep", Options())
    assert len(plan.cells) == 14
    by_name = {cell.name: effective({"overrides": cell.overrides}) for cell in plan.cells}
    half = by_name["frozenlake_filter_slip0p5-Qwen2.5-3B"]
    assert half["custom_envs.CoordFrozenLake.env_config.success_rate"] == "0.5"
    assert half["actor_rollout_ref.rollout.rollout_filter_include_zero"] == "False"
    assert half["actor_rollout_ref.rollout.rollout_filter_value"] == "0.9"
    assert by_name["frozenlake_nofilter_slip0p5-Qwen2.5-3B"]["actor_rollout_ref.rollout.rollout_filter_value"] == "1.0"


# --- what is refused ----------------------------------------------------------------------------------------------

REFUSED = {
    "./ragen sweep kl_swep": "did you mean kl_sweep",
    "./ragen sweep no/such.yaml": "no such file",
    "./ragen sweep kl_sweep --kl-value 0": "did you mean --kl-values",
    "./ragen sweep kl_sweep trainer.test_freq=5": "overrides follow --",
    "./ragen sweep kl_sweep --kl-values": "--kl-values: expected one argument",
    "./ragen sweep kl_sweep --kl-values=": "--kl-values '': is empty",
    "./ragen sweep kl_sweep --kl-values ,": "the list is empty",
    "./ragen sweep kl_sweep --kl-values 0,x": "--kl-values x: takes a number",
    "./ragen sweep kl_sweep --kl-values 1.0,10": "1.0 and 10 have one label",
    "./ragen sweep kl_sweep --kl-values 0,0.0 --gpus 0": "would be the same run under several names",
    "./ragen sweep kl_sweep --rollout_filter_include_zero maybe": "takes True or False",
    "./ragen sweep kl_sweep --gpus 0,1,2,3 --gpus-per-exp 3": "4 GPUs (0,1,2,3) cannot be cut into slots of 3",
    "./ragen sweep kl_sweep --gpus 0,1 --gpus-per-exp 4": "there are only 2 GPUs",
    "./ragen sweep kl_sweep --gpus cpu --gpus-per-exp 2": "one cpu slot",
    "./ragen sweep kl_sweep --gpus-per-exp 0": "--gpus-per-exp 0: must be at least 1",
    "./ragen sweep kl_sweep --gpus 0,x": "'x' is not a device",
    "./ragen sweep kl_sweep --steps ten": "--steps ten: takes a whole number",
    "./ragen sweep kl_sweep --seeds 0": "--seeds 0: must be at least 1",
    "./ragen sweep kl_sweep --cooldown -1": "--cooldown -1: takes seconds",
    "./ragen sweep kl_sweep --save-freq x": "--save-freq x: takes a whole number",
    "./ragen sweep kl_sweep --ray-num-cpus 0": "--ray-num-cpus 0: must be at least 1",
    "./ragen sweep kl_sweep --gpu-memory-utilization 2": "at most 1",
    "./ragen sweep kl_sweep --only 0.5": "--only 0.5: there is no such run",
    "./ragen sweep kl_sweep --retry never": "--retry never: unknown; choose from early_stopped, success",
    "./ragen sweep kl_sweep -- model_path=x": "use --model",
    "./ragen sweep kl_sweep -- trainer.experiment_name=x": "an experiment names its runs itself",
    "./ragen sweep kl_sweep -- sokoban": "takes key=value",
    "./ragen sweep kl_sweep --gpus 0 -- trainer.test_freqq=5": "did you mean trainer.test_freq?",
    "./ragen sweep kl_sweep --gpus 0 -- ppo_mini_batch_size=0": "sokoban_kl_sweep_nofilter_0-Qwen2.5-3B: ",
    "./ragen sweep kl_sweep --gpus=-1": "--gpus '-1': no device; write numbers",
    "./ragen sweep kl_sweep --gpus=none": "--gpus 'none': no device; write numbers",
    "./ragen sweep kl_sweep --gpus=0,-1": "'-1' is not a device",
    "./ragen sweep kl_sweep --gpus 0 --kl-values 0.1 -- es_manager.train.env_groups=1": "larger than the batch",
    "./ragen sweep top_p_sweep --rollout_filter_value 1.5": "at most 1",
    "./ragen sweep smoke_test_for_ke --groups 1,7": "--groups 7: unknown; choose from",
    "./ragen sweep smoke_test_for_ke --kl-type k9": "--kl-type k9: unknown: one of kl, mse, low_var_kl",
    "./ragen sweep smoke_test_for_ke --rollout_filter_strategy best": "one of top_p, top_k, min_p, top_f",
    "./ragen sweep smoke_test_for_ke --ray-num-cpus 4": "unknown option --ray-num-cpus",
    "./ragen sweep smoke_test_for_ke --groups 3 --gpus 0 --config nothing": "no such recipe",
    "./ragen sweep all_kl_entropy --kl-type kl": "unknown option --kl-type",
    "./ragen sweep main_table_diff_algo --tasks webshop": "webshop: unknown: one of sokoban, frozenlake, bandit",
    "./ragen sweep main_table_diff_size --model pocket --models pocket": "keep one of them",
    "./ragen sweep main_table_diff_model --models a/x,a__x": "one label",
    "./ragen sweep frozen_lake_slipper_rate_sweep --slipper-rate 1": "write 1% or 100",
    "./ragen sweep model_scaling --gpus 0": "sokoban_7B_instruct_ragen_main needs 2 GPUs",
    "./ragen sweep hyperparam_search --env_name sokoban": "--search_group is missing: one of 1, 2, 3, 4",
    "./ragen sweep hyperparam_search --search_group 1": "--env_name is missing",
    "./ragen sweep hyperparam_search --env_name chess --search_group 1": "--env_name chess: unknown",
    "./ragen sweep hyperparam_search --env_name sokoban --search_group 5": "--search_group 5: unknown; choose from",
    "./ragen sweep hyperparam_search --env_name sokoban --search_group 1 --n_rollout 4": "is what group 1 searches",
    "./ragen sweep hyperparam_search --env_name sokoban --search_group 1 --gpus 0,1,2,3 --n_gpus 3": "slots of 3",
    "./ragen sweep hyperparam_search --env_name sokoban --search_group 3 --train_batch_size x": "--train_batch_size x",
}  # fmt: skip


@pytest.mark.parametrize(("command", "message"), REFUSED.items(), ids=lambda text: text.removeprefix("./ragen sweep "))
def test_refused_with_one_message(command, message):
    done = dry_run(command)
    assert (done.status, done.runs) == (2, [])
    assert message in done.errors
    assert done.errors.startswith("ragen sweep: ") and done.errors.count("ragen sweep: ") == 1


def test_runs_made_equal_by_fewer_groups_are_named():
    """Of two groups, ratios of 0.8, 0.6 and 0.4 are one each."""
    done = dry_run(
        "./ragen sweep smoke_test_for_ke --groups 3 --gpus 0 --rollout_filter_strategy top_k "
        "-- es_manager.train.env_groups=2 ppo_mini_batch_size=8"
    )
    assert done.status == 0 and len(done.runs) == 4
    assert "topk80-kl0-ent0-low_var_kl-ftmt, g3-smoke-ppo-sokoban-topk60" in done.errors
    assert "are the same run" in done.errors


def test_the_same_model_twice_is_refused():
    done = dry_run(
        "./ragen sweep main_table_diff_model --tasks sokoban --filters filter --gpus 0 "
        "--models Qwen2.5-3B,Qwen/Qwen2.5-3B"
    )
    assert done.status == 2 and "would be the same run" in done.errors


TWO_AXES = """
options:
  size: {kind: count, default: [16, 1]}
  zero: {kind: bool, default: ["True", "False"]}
extends: kl_sweep
axes: [size, zero]
values: {kl: {kind: coefficient, default: 0}}
label: "{size}-{zero}"
name: run_{size}_{zero}
log: logs/{name}.log
checkpoints: logs/{name}
fields: ["size={size}", "zero={zero}"]
overrides:
  - es_manager.train.group_size={size}
  - actor_rollout_ref.rollout.rollout_filter_include_zero={zero}
"""


def test_a_start_resolves_every_run_and_a_dry_run_every_value(tmp_path):
    """Groups of one, and groups without variance dropped: each is fine, and both together leave nothing."""
    (tmp_path / "two.yaml").write_text(TWO_AXES)
    sizes = ("ppo_mini_batch_size=8", "actor_rollout_ref.actor.ppo_mini_batch_size=8", "critic.ppo_mini_batch_size=8")
    plan = expand(str(tmp_path / "two.yaml"), Options(overrides=sizes))
    assert [cell.name for cell in plan.cells] == ["run_16_True", "run_16_False", "run_1_True", "run_1_False"]
    check(plan, dry_run=True)
    with pytest.raises(ConfigError, match=r"run_1_False: .* nothing would be left"):
        check(plan)


# --- the command --------------------------------------------------------------------------------------------------


def test_a_dry_run_loads_nothing_heavy_and_says_everything():
    code = (
        "import sys; from ragen.cli import main; status = main(sys.argv[1:]); "
        "print([name for name in ('torch', 'ray', 'transformers', 'wandb') if name in sys.modules]); sys.exit(status)"
    )
    command = [sys.executable, "-c", code, "sweep", "kl_sweep", "--kl-values=0", "--gpus_per_exp=2", "--gpus=6,7"]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([*command, "--dry-run"], capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    line, loaded = done.stdout.splitlines()
    assert loaded == "[]"
    told = json.loads(line)
    assert told["slot"] == "6,7"
    assert {"name", "slot", "log", "checkpoints", "wandb_project", "overrides"} <= told.keys()
    assert told["overrides"][-1] == "system.CUDA_VISIBLE_DEVICES='6,7'"
    assert "trainer.n_gpus_per_node=2" in told["overrides"]


def script(path: str, *words: str, cwd: Path) -> subprocess.CompletedProcess:
    environment = os.environ | {"RAGEN_PYTHON": sys.executable}
    return subprocess.run(
        ["bash", str(ROOT / path), *words], capture_output=True, text=True, env=environment, cwd=cwd, timeout=300
    )


def test_the_smoke_script_passes_its_variables_on(tmp_path):
    done = script("scripts/runs/smoke_test_for_ke.sh", "-g", "3", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [one["slot"] for one in runs] == ["0", "1", "2", "3"]
    assert runs == dry_run("bash scripts/runs/smoke_test_for_ke.sh -g 3").runs
    assert runs[0]["summary"].endswith("smoke_test_results_3B_low_var_kl_ftmt.log")


def test_the_wrapper_forwards_options_and_a_model_brings_its_own_tag(tmp_path):
    words = ("--only", "3", "--steps=7", "--model", "pocket", "--gpus", "cpu", "--max-parallel", "2", "--dry-run")
    done = script("run_all_kl_entropy_exps.sh", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(runs) == 4 and {one["slot"] for one in runs} == {"cpu"}
    assert {effective(one)["trainer.total_training_steps"] for one in runs} == {"7"}
    assert runs[0]["summary"] == "logs/smoke_test_top_p/smoke_test_results_pocket_low_var_kl_ftmt.log"


def test_a_file_of_ones_own_is_meant_from_where_the_user_is(tmp_path):
    text = (ROOT / "docs/experiments.md").read_text().split("```yaml\n")[1].split("```")[0]
    (tmp_path / "lr.yaml").write_text(text)
    done = script("ragen", "sweep", "lr.yaml", "--rates", "1e-4,1e-3", "--gpus", "cpu", "--dry-run", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [json.loads(line)["name"] for line in done.stdout.splitlines()] == [
        "frozenlake_lr_1e-4-pocket",
        "frozenlake_lr_1e-3-pocket",
    ]


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("axes: [lr]", "axis: [lr]", "unknown entry axis; did you mean axes?"),
        ("{lr:label}", "{lr:lable}", "has no part 'lable'; did you mean label?"),
        ("{project}", "{projet}", "there is no variable 'projet'"),
        ("kind: positive", "kind: pos", "there is no kind 'pos'"),
        ("{model:path}", "{model:path", "template"),
        ("about:", "about: [", "lr.yaml: while parsing"),
        ("axes: [lr]", "axes: lr", "axes=lr: input should be a valid list"),
        ("axes: [lr]", "axes: [steps]", "the axis steps is not a variable with a list of values"),
        ("summary: logs/lr.log", "", "has no summary"),
        ("steps: 40", "steps: many", "steps=many: input should be a valid integer"),
    ],
)
def test_mistakes_in_ones_own_file_are_named(tmp_path, old, new, message):
    text = (ROOT / "docs/experiments.md").read_text().split("```yaml\n")[1].split("```")[0]
    assert old in text
    (tmp_path / "lr.yaml").write_text(text.replace(old, new))
    with pytest.raises(ConfigError) as error:
        expand(str(tmp_path / "lr.yaml"), Options())
    assert message in str(error.value)


def test_help_shows_options_defaults_and_examples(capsys):
    from ragen.experiment.command import sweep

    for name in spec.names():
        with pytest.raises(SystemExit) as ended:
            sweep([name, "--help"])
        shown = capsys.readouterr().out
        assert ended.value.code == 0
        assert "examples:" in shown and f"bash {spec.load(name).script}" in shown
        for option in ("--gpus", "--steps", "--cooldown", "--model", "--seeds", "--resume", "--only", "--dry-run"):
            assert option in shown
    assert sweep([]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name}: " in listed for name in spec.names())


def test_every_script_sets_up_and_calls_its_experiment():
    scripts = {ROOT / spec.load(name).script: name for name in spec.names()}
    for path, name in scripts.items():
        text = path.read_text()
        assert os.access(path, os.X_OK) and text.startswith("#!/usr/bin/env bash\n") and "set -euo pipefail" in text
        if name != "all_kl_entropy":
            assert "/env.sh" in text and (f"ragen sweep {name} " in text or f":-{name}}}" in text)
