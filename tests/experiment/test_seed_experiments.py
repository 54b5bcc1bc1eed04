"""Every experiment command of the published documents, and of ours, prints the plan that the text describes."""

import re
from decimal import Decimal
from itertools import product

import pytest
from dry_runs import ROOT, DryRun, dry_run, effective, seed_text

from ragen.experiment import spec

pytestmark = pytest.mark.usefixtures("resolved_once")


VALUES = ["0", "0.001", "0.003", "0.01", "0.03", "0.1"]
COEFFICIENTS = ["0.001", "0.003", "0.01", "0.03"]
EIGHT = [str(number) for number in range(8)]


def commands(seed: str) -> list[str]:
    """What a document says to type, in one line each."""
    text = seed_text(seed).replace("\\\n", " ")
    found = re.findall(r"^bash (?:scripts/|run_all).*$", text, flags=re.MULTILINE)
    return [re.sub(r"\s+", " ", line).strip() for line in found]


def run(command: str) -> DryRun:
    done = dry_run(command)
    assert done.status == 0, done.errors
    return done


def no_dots(value: str) -> str:
    return value.replace(".", "")


EXPECTED = {
    "000": [3],
    "001": [36, 164],
    "002": [8, 2, 6, 2, 6, 6, 2],  # the entropy sweep is named twice
    "003": [1] * 6,  # gradient analysis: one run each
    "004": [9, 4, 6, 9],
}


@pytest.mark.parametrize(("seed", "counts"), EXPECTED.items())
def test_every_command_gives_the_documented_number_of_runs(seed, counts):
    assert [len(run(command).runs) for command in commands(seed)] == counts


def test_the_whole_smoke_grid_has_sixty_eight_runs():
    assert len(run("bash scripts/runs/smoke_test_for_ke.sh").runs) == 68


# --- the three sweeps ---------------------------------------------------------------------------------------------


def test_top_p_sweep():
    done = run("bash scripts/runs/run_top_p_sweep.sh --gpus 0,1,2")
    listed = re.search(r"rollout_filter_value \((.*?)\)", seed_text("002"))[1].split(",")
    assert len(listed) == 8
    for place, (value, one) in enumerate(zip(listed, done.runs, strict=True)):
        label, words = no_dots(value), effective(one)
        name = f"sokoban_top_p_{label}-Qwen2.5-3B"
        assert one["name"] == words["trainer.experiment_name"] == name
        assert one["log"] == f"logs/top_p_sweep_Qwen2.5-3B/{label}/{name}.log"
        assert one["checkpoints"] == f"model_saving/top_p_sweep_Qwen2.5-3B/{label}/{name}"
        assert one["summary"] == "logs/top_p_sweep_Qwen2.5-3B.log"
        assert one["wandb_project"] == "ragen_release_top_p_sweep"
        assert one["slot"] == str(place % 3)
        filtered = value != "nofilter"
        assert words["actor_rollout_ref.rollout.rollout_filter_value"] == (value if filtered else "1.0")
        assert words["actor_rollout_ref.rollout.rollout_filter_include_zero"] == str(not filtered)
        assert words["actor_rollout_ref.actor.use_kl_loss"] == "True"
        assert words["actor_rollout_ref.actor.kl_loss_coef"] == "0.001"
        assert words["actor_rollout_ref.actor.entropy_coeff"] == "0.001"


@pytest.mark.parametrize("kind", ["kl", "entropy"])
@pytest.mark.parametrize("include_zero", [None, "False", "yes"])
def test_kl_and_entropy_sweep(kind, include_zero):
    option = "" if include_zero is None else f" --rollout_filter_include_zero={include_zero}"
    done = run(f"bash scripts/runs/run_{kind}_sweep.sh --gpus 0{option}")
    tag = "filter_zero" if include_zero == "False" else "nofilter"
    for value, one in zip(VALUES, done.runs, strict=True):
        label, words = no_dots(value), effective(one)
        name = f"sokoban_{kind}_sweep_{tag}_{label}-Qwen2.5-3B"
        assert one["name"] == name
        assert one["log"] == f"logs/{kind}_sweep_Qwen2.5-3B/{tag}/{label}/{name}.log"
        assert one["checkpoints"] == f"model_saving/{kind}_sweep_Qwen2.5-3B/{label}/{name}"
        assert words["trainer.default_local_dir"] == one["checkpoints"]
        assert one["summary"] == f"logs/{kind}_sweep_Qwen2.5-3B.log"
        assert one["wandb_project"] == words["trainer.project_name"] == f"ragen_release_{kind}_sweep"
        assert words["actor_rollout_ref.rollout.rollout_filter_include_zero"] == str(tag == "nofilter")
        assert words["actor_rollout_ref.rollout.rollout_filter_value"] == "1"
        assert words["actor_rollout_ref.actor.entropy_from_logits_with_chunking"] == "True"
        kl, entropy = (value, "0.0") if kind == "kl" else ("0", value)
        assert words["actor_rollout_ref.actor.kl_loss_coef"] == kl
        assert words["actor_rollout_ref.actor.use_kl_loss"] == str(kl != "0")
        assert words["actor_rollout_ref.actor.entropy_coeff"] == entropy
        assert "algorithm.kl_ctrl.kl_coef" not in words


def test_a_zero_coefficient_is_zero_however_it_is_written():
    done = run("bash scripts/runs/run_kl_sweep.sh --kl-values 0.00 --gpus 0")
    assert effective(done.runs[0])["actor_rollout_ref.actor.use_kl_loss"] == "False"


def test_what_the_kl_document_lists_is_passed():
    """Its bullets of the form `key=value`, word for word."""
    bullets = dict(re.findall(r"^- `([\w.]+)=([^`<]+)`$", seed_text("000"), flags=re.MULTILINE))
    assert len(bullets) == 20
    for one in run("bash scripts/runs/run_kl_sweep.sh --gpus 0").runs:
        words = effective(one)
        for key, value in bullets.items():
            assert float(words[key]) == float(value) if key.endswith("coeff") else words[key] == value, key


def test_what_the_sweep_document_lists_is_passed_by_all_three():
    shared = seed_text("002").split("Shared setup across all three sweeps:")[1]
    shared = re.sub(
        r"(?=(?:trainer|actor_rollout_ref|critic|es_manager|algorithm)\.)", "\n", shared
    )  # some run together
    pairs = re.findall(r"^((?:\w+\.)+\w+)=(\S+?),?\s*$", shared, flags=re.MULTILINE)
    pairs += [
        (f"actor_rollout_ref.rollout.{key}", value)
        for key, value in re.findall(r"(rollout_filter_(?!value|include)\w+)=(softmax|largest|reward_variance)", shared)
    ]
    listed = dict(pairs)
    assert {"trainer.logger", "es_manager.val.env_groups", "critic.ppo_mini_batch_size"} <= listed.keys()
    assert len(listed) >= 17
    for script in ("top_p", "kl", "entropy"):
        for one in run(f"bash scripts/runs/run_{script}_sweep.sh --gpus 0").runs:
            words = effective(one)
            assert one["start"] == ["--config-name", "_2_sokoban"]
            assert words["model_path"] == "Qwen/Qwen2.5-3B"
            for key, value in listed.items():
                assert words[key] == value, key


def test_documented_options_take_both_forms_and_their_defaults_change_nothing():
    defaults = {"--steps": "400", "--gpus-per-exp": "1", "--ray-num-cpus": "16"}
    defaults |= {"--gpu-memory-utilization": "0.5", "--save-freq": "-1"}
    documented = seed_text("002").split("2. KL Sweep")[1].split("3. Entropy")[0]
    for option, default in defaults.items():
        assert re.search(rf"{option} ?\(default:\s*{default}\)", documented)
    plain = run("bash scripts/runs/run_kl_sweep.sh --gpus 0,1").runs
    spaced = " ".join(f"{option} {default}" for option, default in defaults.items())
    assert run(f"bash scripts/runs/run_kl_sweep.sh --gpus=0,1 {spaced}").runs == plain
    joined = " ".join(f"{option}={default}" for option, default in defaults.items())
    assert run(f"bash scripts/runs/run_kl_sweep.sh --gpus 0,1 {joined}").runs == plain


def test_the_kl_documents_example():
    (command,) = commands("000")
    done = run(command)
    assert [effective(one)["actor_rollout_ref.actor.kl_loss_coef"] for one in done.runs] == ["0", "0.001", "0.01"]
    assert [one["slot"] for one in done.runs] == ["0", "1", "0"]
    for one in done.runs:
        assert "/filter_zero/" in one["log"]
        words = effective(one)
        assert words["trainer.save_freq"] == "50"
        assert words["ray_kwargs.ray_init.num_cpus"] == "16"
        assert words["system.CUDA_VISIBLE_DEVICES"] == f"'{one['slot']}'"


def test_two_points_on_four_gpus_each():
    for command in (line for line in commands("002") if "--gpus-per-exp 4" in line):
        done = run(command)
        assert [one["slot"] for one in done.runs] == ["0,1,2,3", "4,5,6,7"]
        assert {effective(one)["trainer.n_gpus_per_node"] for one in done.runs} == {"4"}


# --- the smoke test -----------------------------------------------------------------------------------------------


def smoke_cells(groups: str, kl_type: str, strategy: str) -> list[dict]:
    """The grid as the document and its tables say it, written out."""
    ratios = {"1.0": ("topk100", "8"), "0.8": ("topk80", "6"), "0.6": ("topk60", "4"), "0.4": ("topk40", "3")}
    cells = []

    def add(group: str, middle: str, ratio: str, kl: str, entropy: str, task_is_zero: bool = False) -> None:
        name = f"g{group}-smoke-ppo-sokoban-{middle}-kl{no_dots(kl)}-ent{no_dots(entropy)}-{kl_type}-ftmt"
        value = {"top_k": ratios[ratio][1], "min_p": str(1 - Decimal(ratio))}.get(strategy, ratio)
        cells.append({"name": name, "value": value, "kl": kl, "entropy": entropy, "zero": task_is_zero})

    for group in groups.split(","):
        if group == "1":
            for ratio, kl in product(ratios, COEFFICIENTS):
                add(group, ratios[ratio][0], ratio, kl, "0")
        if group == "2":
            for ratio, entropy in product(ratios, COEFFICIENTS):
                add(group, ratios[ratio][0], ratio, "0", entropy)
        if group == "3":
            for ratio in ratios:
                add(group, ratios[ratio][0], ratio, "0", "0")
        if group == "4":
            for kl, entropy in product(COEFFICIENTS, COEFFICIENTS):
                add(group, "ta-topk100", "1.0", kl, entropy, True)
        if group == "5":
            for kl, entropy in product(COEFFICIENTS, COEFFICIENTS):
                add(group, "nofilter", "1.0", kl, entropy)
    return cells


def check_smoke(runs: list[dict], groups: str, kl_type: str, strategy: str) -> None:
    for cell, one in zip(smoke_cells(groups, kl_type, strategy), runs, strict=True):
        words = effective(one)
        assert one["name"] == words["trainer.experiment_name"] == cell["name"]
        assert one["log"] == f"logs/smoke_test_{strategy}_details/{cell['name']}.log"
        folder = f"logs/smoke_test_{strategy}"
        assert one["summary"] == f"{folder}/smoke_test_results_3B_{kl_type}_ftmt.log"
        assert one["wandb_project"] == f"ragen-smoke_test_{strategy}"
        assert words["actor_rollout_ref.actor.kl_loss_coef"] == cell["kl"]
        assert words["actor_rollout_ref.actor.use_kl_loss"] == str(cell["kl"] != "0")
        assert words["actor_rollout_ref.actor.kl_loss_type"] == kl_type
        assert words["actor_rollout_ref.actor.entropy_coeff"] == cell["entropy"]
        assert words["actor_rollout_ref.actor.filter_loss_scaling"] == "sqrt"
        assert words["algorithm.zero_task_advantage"] == str(cell["zero"])
        assert words["actor_rollout_ref.rollout.rollout_filter_value"] == cell["value"]
        passed = "top_k_abs" if strategy == "top_k" else strategy
        assert words["actor_rollout_ref.rollout.rollout_filter_strategy"] == passed
        assert words["actor_rollout_ref.rollout.rollout_filter_top_p_prob_mode"] == "softmax"
        assert words["actor_rollout_ref.rollout.rollout_filter_include_zero"] == "True"
        assert words["model_path"] == "Qwen/Qwen2.5-3B-Instruct"
        assert (words["micro_batch_size_per_gpu"], words["ppo_mini_batch_size"]) == ("4", "32")
        assert words["trainer.total_training_steps"] == "50"
        assert words["trainer.val_before_train"] == "False"


def test_smoke_example():
    (command,) = (line for line in commands("001") if "smoke" in line)
    check_smoke(run(command).runs, "1,3,5", "kl", "top_p")


@pytest.mark.parametrize("strategy", ["top_p", "min_p", "top_f"])
def test_group_three_with_each_strategy(strategy):
    done = run(f"bash scripts/runs/smoke_test_for_ke.sh -g 3 --rollout_filter_strategy={strategy}")
    check_smoke(done.runs, "3", "low_var_kl", strategy)


def test_the_wrapper_goes_through_all_estimates():
    (command,) = (line for line in commands("001") if "run_all" in line)
    runs = run(command).runs
    check_smoke(runs[:48], "1,4,5", "kl", "top_k")
    check_smoke(runs[48:96], "1,4,5", "mse", "top_k")
    check_smoke(runs[96:], "1,2,3,4,5", "low_var_kl", "top_k")
    documented = re.findall(r"- `(\w+)` with groups `([\d,]+)`", seed_text("001"))
    assert documented == [("kl", "1,4,5"), ("mse", "1,4,5"), ("low_var_kl", "1,2,3,4,5")]


def test_batches_of_eight_take_the_gpus_in_order():
    """Groups of 16, 4 and 16 runs: batches of 8, 8, 4, 8, 8, each from GPU 0 on."""
    (command,) = (line for line in commands("001") if "smoke" in line)
    assert [one["slot"] for one in run(command).runs] == [*EIGHT, *EIGHT, *EIGHT[:4], *EIGHT, *EIGHT]


def test_the_documents_count_of_each_group():
    counts = [int(count) for count in re.findall(r"= (\d+) runs\)", seed_text("001"))]
    runs = run("bash scripts/runs/smoke_test_for_ke.sh").runs
    assert [sum(one["group"] == group for one in runs) for group in "12345"] == counts == [16, 16, 4, 16, 16]


# --- base experiments ---------------------------------------------------------------------------------------------


def test_search_goes_through_the_listed_values():
    budget = seed_text("004").split("[EXP 1]")[0]
    listed = {name: text.split(", ") for name, text in re.findall(r"- (\w+): \[(.*?)\]", budget)}
    assert list(listed) == ["train_batch_size", "n_rollout", "actor_lr", "kl_coef", "max_turns", "temperature"]
    sections = {name: "optimization" if name in ("actor_lr", "kl_coef") else "training" for name in listed}
    groups = [("train_batch_size", "n_rollout"), ("actor_lr",), ("kl_coef",), ("max_turns", "temperature")]
    later = {"train_batch_size": "8", "n_rollout": "16", "actor_lr": "1e-6", "kl_coef": "0.04"}
    later |= {"max_turns": "5", "temperature": "1.0"}
    total = 0
    for command, searched in zip(commands("004"), groups, strict=True):
        runs = run(command).runs
        total += len(runs)
        for values, one in zip(product(*(listed[name] for name in searched)), runs, strict=True):
            folder = "two_armed_bandit/Qwen__Qwen2.5-3B-Instruct"
            words, chosen = effective(one), later | dict(zip(searched, values, strict=True))
            assert one["start"] == ["two_armed_bandit"]
            for name, value in chosen.items():
                assert words[f"{sections[name]}.{name}"] == value
            assert int(words["training.ppo_batch_size"]) == int(chosen["train_batch_size"]) * int(chosen["n_rollout"])
            assert words["training.micro_batch_size"] == "4"
            assert words["optimization.adv_estimator"] == "grpo"
            assert words["model.base_model"] == "Qwen/Qwen2.5-3B-Instruct"
            parts = "_".join(f"{name}_{chosen[name]}" for name in searched)
            assert one["name"] == f"hyperparam_searching_{parts}"
            assert one["log"] == f"log/terminal/hyper_param_search_logs/{folder}/{one['name']}.log"
            before = [name for group in groups[: groups.index(searched)] for name in group]
            assert one.get("assumed", {}) == {name: later[name] for name in before}
    assert total == 28


def test_model_scaling_has_the_rows_of_the_document():
    text = seed_text("004").replace("\\\n", " ")
    rows = {}
    for line in re.findall(r"^bash train\.sh sokoban .*$", text, flags=re.MULTILINE):
        words = line.partition(" > ")[0].split()[3:]
        typed = dict(word.split("=", 1) for word in words if "=" in word)
        if typed.get("model.experiment_name", "").endswith("_ragen_main"):
            rows[typed["model.base_model"]] = typed
    done = run("bash scripts/runs/run_model_scaling.sh --gpus 0,1,2,3")
    assert len(done.runs) == len(rows) == 4
    assert [one["slot"] for one in done.runs] == ["0", "1", "2", "0,1"]
    for one in done.runs:
        words = effective(one)
        row = rows[words["model.base_model"]]
        assert row.items() <= words.items()
        assert one["log"] == f"log/terminal/{row['model.experiment_name']}.log"
        assert one["checkpoints"] == f"checkpoints/RAGEN/{row['model.experiment_name']}"
        assert words["system.n_gpus"] == row.get("system.n_gpus", "1")


# --- docs/experiments.md -------------------------------------------------------------------------------------------

DOCS = (ROOT / "docs/experiments.md").read_text()
OURS = [
    line
    for block in re.findall(r"^```bash\n(.*?)^```", DOCS, flags=re.MULTILINE | re.DOTALL)
    for line in block.splitlines()
    if not line.startswith("./ragen eval ")  # docs/evaluation.md has those, with their own test
    and "scripts/studies/" not in line  # tests/scripts
]


@pytest.mark.parametrize("line", OURS, ids=lambda line: re.sub(r"\s+", " ", line)[:70])
def test_command(line):
    command, _, remark = line.partition("#")
    done = dry_run(re.sub(r"\s+", " ", command).strip())
    assert done.status == 0, done.errors
    count = re.match(r" (\d+) runs?", remark)
    assert len(done.runs) == (int(count[1]) if count else 6)


def test_every_experiment_is_documented():
    for name in spec.names():
        assert f"bash {spec.load(name).script}" in DOCS


def test_every_command_of_the_published_documents_is_there():
    shown = [re.sub(r"\s+", " ", line.partition("#")[0]).strip() for line in OURS]
    for seed in EXPECTED:
        assert set(commands(seed)) <= set(shown)
