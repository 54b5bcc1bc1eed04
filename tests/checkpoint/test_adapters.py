"""Training with adapters: nothing else changes, the base is the reference, and a checkpoint holds no more than them."""

import json
import shutil
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import ACTOR, TINY
from transformers import AutoModelForCausalLM, AutoTokenizer, Qwen3Config, Qwen3ForCausalLM
from without_clock import metrics_without_clock

from ragen.checkpoint.merge import merge, plan
from ragen.checkpoint.parts import Parts, part_of
from ragen.checkpoint.restore import restore
from ragen.checkpoint.save import CheckpointStore
from ragen.cli import main
from ragen.config.compose import resolve
from ragen.config.derive import reference_is_actor
from ragen.config.schema import Optimizer
from ragen.errors import ConfigError
from ragen.model import smollm2
from ragen.model.attention import Packed
from ragen.model.load import find_model, load_model
from ragen.model.lora import add_adapters, merged_state, save_adapter
from ragen.store.manifest import OtherModel
from ragen.store.run_folder import RunFolder
from ragen.train import learner, trainer
from ragen.train.optimizer import MasterAdamW

KL = [f"{ACTOR}.use_kl_loss=True", f"{ACTOR}.kl_loss_coef=0.1"]
RATES = [f"{ACTOR}.optim.lr=1e-3", "critic.optim.lr=1e-3"]
GAE = "algorithm.adv_estimator=gae"
WORDS = [
    *TINY,
    *KL,
    *RATES,
    GAE,
    "lora.rank=8",
    "lora.alpha=16",
    "trainer.total_training_steps=2",
    "trainer.save_freq=1",
]
WORDS += ["trainer.max_actor_ckpt_to_keep=null", "trainer.max_critic_ckpt_to_keep=null"]
IDS = torch.arange(40)


def train(folder, *words):
    return trainer.train(resolve([*WORDS, *words, f"trainer.default_local_dir={folder}"], environ={}).config)


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@torch.no_grad()
def logits(model):
    attend = Packed([len(IDS)])
    return model.logits(model.hidden(IDS, attend.positions, attend))


class Finished:
    """A run of two steps, and the models that it loaded: at its end, and their weights at its beginning."""

    def __init__(self, folder):
        self.folder, self.models, self.begun = folder, [], []
        original = learner.load_model

        def load_model(*given):
            loaded = original(*given)
            self.models.append(loaded.model)
            self.begun.append({name: weight.clone() for name, weight in loaded.model.state_dict().items()})
            return loaded

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(learner, "load_model", load_model)
            self.run = train(folder)

    @property
    def checkpoint(self):
        return self.folder / "global_step_2"


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    return Finished(tmp_path_factory.mktemp("lora") / "run")


# --- a run --------------------------------------------------------------------------------------------------------


def test_the_base_stays_and_the_adapters_learn(finished):
    assert finished.run.status == "finished"
    assert len(finished.models) == 2, "an actor and a critic, and no reference"
    for model, begun in zip(finished.models, finished.begun, strict=True):
        now = model.state_dict()
        assert all(torch.equal(now[name], weight) for name, weight in begun.items())
        adapters = {name: weight for name, weight in now.items() if name not in begun}
        assert adapters and all(name.startswith("adapters.") for name in adapters)
        assert all(bool(weight.any()) for weight in adapters.values()), "every B has left zero"


def test_the_reference_is_the_actor_without_its_adapter(finished):
    first, second = metrics_without_clock(finished.folder)
    assert first["actor/kl_loss"] == pytest.approx(0, abs=1e-6), "before the first update they are one"
    assert second["actor/kl_loss"] > 1e-4
    assert all(row["actor/grad_norm"] > 0 and row["critic/grad_norm"] > 0 for row in (first, second))


def test_sampler_and_learner_are_one_policy(finished):
    assert all(row["rollout/log_prob_diff_max"] < 1e-5 for row in metrics_without_clock(finished.folder))


def test_only_what_has_an_adapter_is_its_own_reference(tmp_path, monkeypatch):
    loaded, original = [], learner.load_model

    def load_model(*given):
        loaded.append(given[0].name)
        return original(*given)

    monkeypatch.setattr(learner, "load_model", load_model)
    train(tmp_path / "run", "actor_rollout_ref.model.lora_rank=0", "trainer.total_training_steps=1")
    assert loaded == ["pocket"] * 3, "a critic's adapter does not make the actor's reference"
    held = {path.name for path in (tmp_path / "run/global_step_1").glob("*/*.safetensors")}
    assert held == {"model.safetensors", "adapter_model.safetensors", "optimizer.safetensors", "value_head.safetensors"}


@pytest.mark.parametrize(("words", "expected"), [(["lora.rank=4"], True), (["critic.model.lora_rank=4"], False)])
def test_whose_rank_decides_about_the_reference(words, expected):
    assert reference_is_actor(resolve(["sokoban", "model_path=pocket", *words], environ={}).config) is expected


def test_unknown_layers_are_named(tmp_path, capsys):
    words = [*WORDS, "lora.target_modules=[q_proj,nowhere]", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["train", *words]) == 2
    told = capsys.readouterr().err
    assert "no linear layer is called nowhere" in told and "q_proj, k_proj" in told


# --- checkpoints --------------------------------------------------------------------------------------------------


def test_a_checkpoint_holds_the_adapters_alone(finished):
    for name in ("actor", "critic"):
        held = {path.name for path in (finished.checkpoint / name).glob("*.safetensors")}
        assert held == {"adapter_model.safetensors"} | ({"value_head.safetensors"} if name == "critic" else set())
        trained = load_file(finished.checkpoint / name / "adapter_model.safetensors")
        moments = load_file(finished.checkpoint / f"{name}_optimizer/optimizer.safetensors")
        numbers = sum(moment.numel() for key, moment in moments.items() if key.startswith("exp_avg/"))
        assert numbers == sum(weight.numel() for weight in trained.values()) + (129 if name == "critic" else 0)
    settings = json.loads((finished.checkpoint / "actor/adapter_config.json").read_text())
    assert (settings["base_model_name_or_path"], settings["r"], settings["lora_alpha"]) == ("pocket", 8, 16)


def test_a_checkpoint_opens_as_a_model(finished):
    actor = finished.models[0]
    for name in (finished.checkpoint, finished.checkpoint / "actor"):
        loaded = load_model(find_model(str(name)), "cpu")
        assert torch.allclose(logits(loaded.model), logits(actor), atol=1e-4)
    assert loaded.tokenizer.get_vocab() == AutoTokenizer.from_pretrained(find_model("pocket").folder).get_vocab()


def test_peft_opens_a_checkpoint(finished):
    peft = pytest.importorskip("peft", reason="peft is not installed: it comes with the extra dev")
    base = AutoModelForCausalLM.from_pretrained(find_model("pocket").folder)
    module = peft.PeftModel.from_pretrained(base, finished.checkpoint / "actor").eval()
    with torch.no_grad():
        assert torch.allclose(module(IDS[None]).logits[0], logits(finished.models[0]), atol=1e-4)


def test_a_resumed_run_ends_bit_equal(finished, tmp_path):
    """One step and then one more: in its own folder, with a larger budget."""
    train(tmp_path / "run", "trainer.total_training_steps=1")
    train(tmp_path / "run")
    assert metrics_without_clock(tmp_path / "run") == metrics_without_clock(finished.folder)
    for path in finished.checkpoint.rglob("*.safetensors"):
        one, other = load_file(path), load_file(tmp_path / "run/global_step_2" / path.relative_to(finished.checkpoint))
        assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["lora.rank=4"], r"actor has lora\.rank=8, but this run has lora\.rank=4: set it as it was"),
        (
            ["lora.alpha=8", "lora.target_modules='.*[qv]_proj'"],
            r"lora\.alpha=16 lora\.target_modules=\[down_proj,gate_proj,k_proj,o_proj,q_proj,up_proj,v_proj\], "
            r"but this run has lora\.alpha=8 lora\.target_modules=\[q_proj,v_proj\]: set it as it was",
        ),
        (["critic.model.lora_alpha=8"], r"critic has critic\.model\.lora_alpha=16, but this run has .*=8: set it as"),
        (
            ["model_path=pocket-blank"],
            "was trained on pocket, and pocket-blank has different weights: set model_path=pocket,",
        ),
        (["critic.model.path=pocket-blank"], "critic was trained on pocket, and pocket-blank has different weights"),
        (["lora.rank=0"], r"an adapter of the actor, but this run trains all weights: set actor_rollout_ref\.model"),
        (
            ["critic.model.lora_rank=0"],
            r"an adapter of the critic, but this run trains all weights: set critic\.model",
        ),
    ],
)
def test_a_checkpoint_of_other_adapters_is_refused(finished, tmp_path, words, message):
    origin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={finished.checkpoint}"]
    with pytest.raises(OtherModel, match=message):
        train(tmp_path / "run", *words, *origin)


def test_nothing_is_announced_before_it_is_refused(finished, tmp_path, capsys):
    origin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={finished.checkpoint}"]
    words = [*WORDS, *origin, "trainer.total_training_steps=3", f"trainer.default_local_dir={tmp_path / 'run'}"]
    assert main(["train", *words, "lora.rank=4"]) == 2
    told = capsys.readouterr()
    assert "lora.rank=8" in told.err and "starts after step 2" not in told.out + told.err
    assert main(["train", *words]) == 0
    assert "starts after step 2" in "".join(capsys.readouterr())


def adapted(name, rank=2):
    """A model and a new adapter, as what a checkpoint holds."""
    loaded = load_model(find_model(str(name)), "cpu")
    add_adapters(loaded.model, rank, 4)
    return Parts(part_of(loaded))


@pytest.mark.parametrize("is_old", [False, True], ids=["with its digest", "of an older version"])
def test_what_the_base_is_decides_and_not_what_it_is_called(tmp_path, monkeypatch, is_old):
    base = shutil.copytree(find_model("pocket").folder, tmp_path / "base")
    parts = adapted(base)
    if is_old:
        parts = replace(parts, actor=replace(parts.actor, base_digest=""))
    path = CheckpointStore(tmp_path / "run").save(1, parts)
    assert (path / "actor/base_digest.txt").exists() is not is_old
    monkeypatch.chdir(tmp_path)
    shutil.copytree(base, tmp_path / "copy")
    for same in ("base", base, "copy", "pocket"):
        restore(path, adapted(same))
    with pytest.raises(OtherModel, match=rf"trained on {base}, and pocket-blank has different weights"):
        restore(path, adapted("pocket-blank"))
    base.rename(tmp_path / "moved")
    restore(path, adapted("moved"))


def test_a_base_with_other_weights_in_its_place(tmp_path):
    base = shutil.copytree(find_model("pocket").folder, tmp_path / "base")
    path = CheckpointStore(tmp_path / "run").save(1, adapted(base))
    weights = load_file(base / "model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, base / "model.safetensors")
    with pytest.raises(OtherModel, match=rf"trained on {base}, and {base} has different weights"):
        restore(path, adapted(base))


def test_an_older_checkpoint_with_a_name_of_the_hub(tmp_path):
    parts = adapted("pocket")
    stored = replace(parts, actor=replace(parts.actor, base_model="Qwen/Qwen2.5-0.5B", base_digest=""))
    path = CheckpointStore(tmp_path / "run").save(1, stored)
    restore(path, replace(parts, actor=replace(parts.actor, base_model="Qwen/Qwen2.5-0.5B")))
    with pytest.raises(OtherModel, match=r"on Qwen/Qwen2\.5-0\.5B, and pocket has different weights"):
        restore(path, parts)


def test_a_critic_is_no_model(finished, tmp_path, capsys):
    critic = finished.checkpoint / "critic"
    for command in (
        ["merge", str(critic)],
        ["train", *TINY, f"model_path={critic}", f"trainer.default_local_dir={tmp_path}"],
    ):
        assert main(command) == 2
        assert f"is a critic and cannot generate text: use its checkpoint, {finished.checkpoint}" in (
            capsys.readouterr().err
        )
    assert {path.name for path in finished.checkpoint.iterdir()} >= {"actor", "critic"}
    assert not list(finished.checkpoint.glob("*_merged"))


def test_an_adapter_is_not_filled_from_full_weights(tmp_path):
    full = CheckpointStore(tmp_path / "full").save(1, Parts(part_of(load_model(find_model("pocket"), "cpu"))))
    assert find_model(str(full)).folder == full / "actor"
    origin = ["trainer.resume_mode=resume_path", f"trainer.resume_from_path={full}"]
    with pytest.raises(OtherModel, match=r"all weights of the actor, but this run trains an adapter: set .*rank=0"):
        train(tmp_path / "run", *origin)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_another_family_is_saved_restored_and_merged(tmp_path, dtype):
    """Qwen3 goes through the Hugging Face module. In bf16 the optimizer has its own weights."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=622, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=4, dtype="bfloat16",
    )  # fmt: skip
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "base")
    load_model(find_model("pocket"), "cpu").tokenizer.save_pretrained(tmp_path / "base")
    settings = Optimizer(lr=0.1)
    parts = []
    for seed in (1, 2):
        loaded = load_model(find_model(str(tmp_path / "base")), "cpu")
        add_adapters(loaded.model.to(dtype), 4, 8, seed=seed)
        parts.append(Parts(part_of(loaded, MasterAdamW(loaded.model.parameters(), settings, 10))))
    trained, fresh = (part.actor.model for part in parts)
    attend = Packed([len(IDS)])
    for _ in range(2):
        trained.logits(trained.hidden(IDS, attend.positions, attend)).logsumexp(-1).sum().backward()
        parts[0].actor.optimizer.step(max_norm=1.0)
    store = CheckpointStore(tmp_path / "run")
    path = store.save(7, parts[0])
    assert not torch.allclose(logits(fresh), logits(trained), atol=1e-2)
    restore(path, parts[1])
    assert torch.equal(logits(fresh), logits(trained))
    one, two = (part.actor.optimizer.tensors(part.actor.model) for part in parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    loaded = load_model(find_model(str(path)), "cpu")
    tolerance = 1e-4 if dtype == torch.float32 else 0.05
    assert torch.allclose(logits(loaded.model), logits(trained).float(), atol=tolerance)
    planned = plan(path)
    size = (tmp_path / "base/model.safetensors").stat().st_size
    assert planned.dtype == torch.bfloat16 and abs(planned.num_bytes - size) < 10_000
    stored = load_file(merge(planned) / "model.safetensors")
    wanted = {name: weight.to(torch.bfloat16) for name, weight in merged_state(trained).items()}
    assert all(torch.equal(weight, wanted[name]) for name, weight in stored.items())
    assert AutoModelForCausalLM.from_pretrained(planned.output, dtype="auto").dtype == torch.bfloat16


# --- merging ------------------------------------------------------------------------------------------------------


def test_merged_is_an_ordinary_folder(finished, tmp_path):
    planned = plan(finished.checkpoint, tmp_path / "deep" / "merged")
    size = (find_model("pocket").folder / "model.safetensors").stat().st_size
    assert abs(planned.num_bytes - size) < 10_000, "the header of the file aside"
    assert merge(planned) == tmp_path / "deep" / "merged"
    module = AutoModelForCausalLM.from_pretrained(tmp_path / "deep" / "merged")
    with torch.no_grad():
        assert torch.allclose(module(IDS[None]).logits[0], logits(finished.models[0]), atol=1e-4)
    loaded = load_model(find_model(str(tmp_path / "deep" / "merged")), "cpu")
    assert torch.allclose(logits(loaded.model), logits(finished.models[0]), atol=1e-4)
    assert [path.name for path in (tmp_path / "deep").iterdir()] == ["merged"], "nothing is left over"


def test_the_verb(finished, tmp_path, capsys):
    output = tmp_path / "merged"
    assert main(["merge", str(finished.checkpoint), "--output", str(output), "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "base: pocket" in told and f"output: {output}, 3.5 MB in float32" in told and not output.exists()
    assert main(["merge", str(finished.checkpoint / "actor"), "--output", str(output)]) == 0
    assert capsys.readouterr().out.endswith(f"merged: {output}\n")
    before = contents(output)
    assert main(["merge", str(finished.checkpoint), "--output", str(output)]) == 2
    assert "nothing is overwritten" in capsys.readouterr().err
    assert contents(output) == before


def test_where_it_is_written_by_itself(finished):
    assert plan(finished.checkpoint).output == finished.folder / "global_step_2_merged"
    assert plan(finished.checkpoint / "actor").output == finished.folder / "global_step_2_merged"


def test_an_adapter_of_a_quantised_file_is_merged_into_what_was_made_of_it(tmp_path, monkeypatch):
    """SmolLM2's package holds no config.json: the folder in the cache does."""
    pocket = find_model("pocket")
    monkeypatch.setattr(smollm2, "find", lambda: (tmp_path / "package", "small.gguf"))
    monkeypatch.setattr(smollm2, "converted", lambda folder, file: pocket.folder)
    trained = load_model(find_model("smollm2"), "cpu")
    add_adapters(trained.model, 2, 4)
    with torch.no_grad():
        trained.model.adapters.requires_grad_(False)
        for adapter in trained.model.adapters.values():
            adapter.B.fill_(0.01)
    save_adapter(trained.model, tmp_path / "adapter", "smollm2")
    planned = plan(tmp_path / "adapter")
    assert planned.source.model_folder == pocket.folder and "base: smollm2" in str(planned)
    merged = load_model(find_model(str(merge(planned))), "cpu")
    assert torch.allclose(logits(merged.model), logits(trained.model), atol=1e-4)


def test_what_cannot_be_merged(finished, tmp_path):
    with pytest.raises(ConfigError, match="nowhere is not a directory; give a checkpoint"):
        plan(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match="holds no adapter; give a checkpoint"):
        plan(tmp_path)
    with pytest.raises(ConfigError, match="holds all weights and no adapter"):
        plan(find_model("pocket").folder)
    damaged = tmp_path / "global_step_2"
    shutil.copytree(finished.checkpoint, damaged)
    (damaged / "actor/adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"adapter_model\.safetensors has 0 bytes"):
        plan(damaged)
    assert {path.name for path in tmp_path.iterdir()} == {"global_step_2"}


def test_nothing_is_written_into_a_checkpoint(finished):
    with pytest.raises(ConfigError, match=r"critic/new is inside the checkpoint .*global_step_2: .* --output"):
        plan(finished.checkpoint, finished.checkpoint / "critic/new")


@pytest.fixture
def checkout(tmp_path):
    """A base, a run of an adapter of it, and a run of an adapter above that one: all below one folder."""
    root = tmp_path / "old"
    shutil.copytree(find_model("pocket").folder, root / "models/base")
    above = {"one": "models/base", "two": "checkpoints/one/global_step_1"}
    for name, base in above.items():
        place = f"checkpoints/{name}"
        words = [*TINY, f"model_path={base}", f"trainer.default_local_dir={place}"]
        RunFolder(root / place).write_config(resolve(words, environ={}).config)
        CheckpointStore(root / place).save(1, adapted(root / base))
    return root


def test_a_checkout_can_be_moved(checkout, tmp_path, monkeypatch):
    before = find_model(str(checkout / "checkpoints/two/global_step_1"))
    new = checkout.rename(tmp_path / "new")
    monkeypatch.chdir(tmp_path)
    for name in (new / "checkpoints/two/global_step_1", "new/checkpoints/two/global_step_1/actor"):
        found = find_model(str(name))
        assert found.base.base.folder == new / "models/base" and found.digest
        assert plan(tmp_path / name, tmp_path / "merged").source.model_folder == new / "models/base"
    assert before.base.base.folder == checkout / "models/base"
    weights = load_file(new / "models/base/model.safetensors")
    save_file({name: weight + 1e-3 for name, weight in weights.items()}, new / "models/base/model.safetensors")
    with pytest.raises(ConfigError, match=rf"of {checkout}/models/base: .*{new}/models/base has different weights"):
        find_model(str(new / "checkpoints/one/global_step_1"))


def test_another_base_can_be_named(checkout, tmp_path, capsys, monkeypatch):
    checkpoint, base = checkout / "checkpoints/one/global_step_1", tmp_path / "elsewhere"
    (checkout / "models/base").rename(base)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert main(["merge", str(checkpoint), "--dry-run"]) == 2
    told = capsys.readouterr().err
    assert f"is an adapter of {checkout}/models/base: model {checkout}/models/base: directory not found" in told
    assert "--base MODEL" in told and "Repo id" not in told and "pocket" not in told
    for name in ("pocket-blank", str(base)):
        assert main(["merge", str(checkpoint), "--base", name, "--dry-run"]) == 0
        assert ("(not the weights that the adapter was" in capsys.readouterr().out) is (name == "pocket-blank")
    assert main(["merge", str(checkpoint), "--base", "~/elsewhere", "--output", "~/merged"]) == 0
    assert (tmp_path / "merged/config.json").exists() and str(tmp_path / "merged") in capsys.readouterr().out


def test_an_error_without_a_file_is_not_one_of_the_output(tmp_path, capsys, monkeypatch):
    def missing(*given):
        raise FileNotFoundError("No such file or directory: weights")  # as safetensors does

    monkeypatch.setattr("ragen.cli._discard_output", lambda: None)
    monkeypatch.setattr("ragen.checkpoint.merge.plan", missing)
    assert main(["merge", str(tmp_path)]) == 1
    assert capsys.readouterr().err == "ragen merge: No such file or directory: weights\n"


def test_a_failed_merge_leaves_nothing(finished, tmp_path, monkeypatch):
    def full(*given):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("ragen.checkpoint.model_folder.write_tensors", full)
    with pytest.raises(OSError, match="No space"):
        merge(plan(finished.checkpoint, tmp_path / "merged"))
    assert not list(tmp_path.iterdir())


# --- several workers ----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_two_workers_equal_one(finished, nursery, tmp_path):
    """Both draw the same first numbers, and hold the same adapters afterwards."""
    shared = tmp_path / "shared"
    shared.mkdir()
    words = ["train", *WORDS, f"trainer.default_local_dir={tmp_path / 'run'}", "trainer.n_gpus_per_node=2"]
    place = {"WORLD_SIZE": "2", "RAGEN_WORKERS": str(shared)}
    both = [place | {"RANK": rank, "LOCAL_RANK": rank} for rank in ("0", "1")]
    children = [nursery.start(*words, environment=environment) for environment in both]
    assert [child.end().status for child in children] == [0, 0]
    for row, other in zip(metrics_without_clock(finished.folder), metrics_without_clock(tmp_path / "run"), strict=True):
        assert other == pytest.approx(row, abs=1e-4, rel=1e-4)
    base, one, two = (
        logits(load_model(find_model(str(name)), "cpu").model)
        for name in ("pocket", finished.checkpoint, tmp_path / "run/global_step_2")
    )
    # Adam makes much of rounding where a gradient is almost zero: what they compute is compared, not each number.
    assert float((one - two).abs().max()) < 0.01 * float((one - base).abs().max())
