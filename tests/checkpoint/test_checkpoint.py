"""Checkpoints: opened by transformers, restored bit for bit, and whole after a kill, a full disk or damage."""

import errno
import json
import math
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    MistralConfig,
    Olmo2Config,
    Qwen2Config,
    Qwen3Config,
)

from ragen.checkpoint import model_folder, save
from ragen.checkpoint.parts import Part, Parts, part_of
from ragen.checkpoint.restore import restore
from ragen.checkpoint.save import CheckpointStore, SaveFailed
from ragen.checkpoint.tensor_file import TensorFiles, write_tensors
from ragen.config.compose import resolve
from ragen.config.schema import Optimizer
from ragen.model.attention import Packed
from ragen.model.critic import Critic
from ragen.model.decoder import Decoder, Shape, to_huggingface, unsupported
from ragen.model.huggingface import ATTENTION, HuggingFaceModel
from ragen.model.load import LoadedModel, Source
from ragen.store import manifest
from ragen.store.manifest import CheckpointError, Damaged, NotACheckpoint, OtherModel
from ragen.store.run_folder import RunFolder
from ragen.train.optimizer import MasterAdamW

VOCAB = 23
SIZES = dict(
    vocab_size=VOCAB, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64,
)  # fmt: skip
SETTINGS = Optimizer(lr=1e-2, lr_scheduler_type="cosine", lr_warmup_steps=2)
TRACKER = "latest_checkpointed_iteration.txt"


class RandomCritic(Critic):
    """Its head is not zero, so that a head that was not stored is noticed."""

    def __init__(self, backbone):
        super().__init__(backbone)
        self.head = nn.Linear(backbone.shape.hidden_size, 1)


def make_model(config, dtype=torch.float32, seed=0):
    torch.manual_seed(seed)
    if unsupported(config):
        model = HuggingFaceModel(AutoModelForCausalLM.from_config(config, attn_implementation=ATTENTION))
    else:
        model = Decoder(Shape.of(config))
    return model.to(dtype)


def make_part(config=None, dtype=torch.float32, seed=0, critic=False, trained=True):
    config = config or Qwen2Config(**SIZES, tie_word_embeddings=True)
    model = make_model(config, dtype, seed)
    if critic:
        model = RandomCritic(model).to(dtype)
    return Part(model, config, optimizer=MasterAdamW(model.parameters(), SETTINGS, 6) if trained else None)


def make_parts(dtype=torch.float32, seed=0, critic=True, **state):
    return Parts(make_part(None, dtype, seed), make_part(None, dtype, seed + 1, True) if critic else None, state)


def train(parts, num_steps):
    """Real updates, on tokens that depend on the step alone."""
    for _ in range(num_steps):
        for part in parts.by_name().values():
            step = part.optimizer.num_steps
            ids = torch.randint(0, VOCAB, (9,), generator=torch.Generator().manual_seed(step))
            attend = Packed([4, 5])
            hidden = part.backbone.hidden(ids, attend.positions, attend)
            if part.value_head is None:
                loss = nn.functional.cross_entropy(part.model.logits(hidden).float(), ids.roll(1))
            else:
                loss = (part.value_head(hidden).float() - 1).square().mean()
            loss.backward()
            part.optimizer.step(1.0)
            part.optimizer.advance()


def everything(parts):
    """All numbers of all parts, as bytes."""
    listed = {}
    for name, part in parts.by_name().items():
        tensors = part.model.state_dict() | {f"optimizer/{k}": v for k, v in part.optimizer.tensors(part.model).items()}
        listed |= {f"{name}/{key}": bytes(value.view(torch.uint8).numpy()) for key, value in flat(tensors).items()}
        listed[f"{name}/num_steps"] = part.optimizer.num_steps
    return listed


def flat(tensors):
    return {key: value.detach().contiguous().reshape(-1) for key, value in tensors.items()}


def names_in(folder):
    return sorted(path.name for path in Path(folder).iterdir())


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "run")


# --- layout -------------------------------------------------------------------------------------------------------


def test_the_layout(store):
    path = store.save(3, make_parts(early_stop={"num_empty": 2}))
    assert path == store.folder / "global_step_3"
    assert (store.folder / TRACKER).read_text() == "3\n"
    found = sorted(file.relative_to(path).as_posix() for file in path.rglob("*") if file.is_file())
    assert found == [
        "actor/config.json", "actor/model.safetensors",
        "actor_optimizer/optimizer.json", "actor_optimizer/optimizer.safetensors",
        "critic/config.json", "critic/model.safetensors", "critic/value_head.safetensors",
        "critic_optimizer/optimizer.json", "critic_optimizer/optimizer.safetensors",
        "manifest.json", "trainer_state.json",
    ]  # fmt: skip
    assert json.loads((path / "trainer_state.json").read_text()) == {"early_stop": {"num_empty": 2}}
    files = json.loads((path / "manifest.json").read_text())["checkpoint"]["files"]
    assert sorted(files) == [name for name in found if name != "manifest.json"]
    for name, (size, crc32) in files.items():
        content = (path / name).read_bytes()
        assert (size, crc32) == (len(content), zlib.crc32(content))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("family", [Qwen2Config, LlamaConfig, Qwen3Config, MistralConfig, Olmo2Config])
def test_transformers_opens_the_actor(store, family, tied, dtype):
    part = make_part(family(**SIZES, tie_word_embeddings=tied), dtype)
    path = store.save(1, Parts(part)) / "actor"
    theirs = AutoModelForCausalLM.from_pretrained(path)
    assert theirs.dtype == dtype and theirs.config.model_type == family.model_type
    ours = to_huggingface(part.model) if isinstance(part.model, Decoder) else part.model.module.state_dict()
    assert all(torch.equal(theirs.state_dict()[name], weight) for name, weight in ours.items())


def test_the_tokenizer_and_the_generation_settings_come_along(store, tmp_path):
    from ragen.model.pocket.load import pocket_folder

    source = shutil.copytree(pocket_folder(), tmp_path / "source")
    (source / "generation_config.json").write_text('{"eos_token_id": [1, 2]}')
    tokenizer = AutoTokenizer.from_pretrained(source)
    model = make_model(Qwen2Config(**SIZES))
    path = store.save(1, Parts(part_of(LoadedModel(model, tokenizer, Source("mine", source))))) / "actor"
    again = AutoTokenizer.from_pretrained(path)
    messages = [{"role": "user", "content": "You are at (1, 2)."}]
    assert again.chat_template == tokenizer.chat_template
    assert again.apply_chat_template(messages) == tokenizer.apply_chat_template(messages)
    assert (path / "generation_config.json").read_text() == '{"eos_token_id": [1, 2]}'


@pytest.mark.parametrize("limit", [1, 3000, 100_000])
def test_large_weights_are_cut_into_files(store, monkeypatch, limit):
    monkeypatch.setattr(model_folder, "SHARD_BYTES", limit)
    parts = make_parts(critic=False)
    path = store.save(1, parts) / "actor"
    weights = to_huggingface(parts.actor.model)
    shards = [load_file(file) for file in sorted(path.glob("*.safetensors"))]
    sizes = [sum(weight.nbytes for weight in shard.values()) for shard in shards]
    assert sum(sizes) == sum(weight.nbytes for weight in weights.values())
    assert all(size <= limit or len(shard) == 1 for size, shard in zip(sizes, shards, strict=True))
    assert (path / "model.safetensors").exists() == (len(shards) == 1) == (limit == 100_000)
    theirs = AutoModelForCausalLM.from_pretrained(path).state_dict()
    assert all(torch.equal(theirs[name], weight) for name, weight in weights.items())
    other = make_parts(seed=5, critic=False)
    restore(manifest.latest(store.folder), other)
    assert everything(other) == everything(parts)


DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


@given(
    st.dictionaries(
        st.text(st.characters(codec="utf-8"), min_size=1, max_size=8).filter(lambda name: name != "__metadata__"),
        st.tuples(st.lists(st.integers(0, 4), max_size=3), st.sampled_from(DTYPES), st.booleans()),
        max_size=6,
    )
)
def test_any_tensors_are_read_back_by_the_library(tmp_path_factory, described):
    generator = torch.Generator().manual_seed(0)
    tensors = {}
    for name, (shape, dtype, is_turned) in described.items():
        tensor = (torch.randn(shape, generator=generator) * 3).to(dtype)
        tensors[name] = tensor.mT if is_turned and tensor.ndim > 1 else tensor
    path = tmp_path_factory.mktemp("tensors") / "file"
    size, crc32 = write_tensors(path, tensors)
    assert (size, crc32) == (path.stat().st_size, zlib.crc32(path.read_bytes()))
    for found in (load_file(path), TensorFiles([path])):
        assert set(found) == set(tensors)
        assert all(found[name].dtype == tensor.dtype for name, tensor in tensors.items())
        assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    assert TensorFiles([path]).shapes() == {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    length = int.from_bytes(path.read_bytes()[:8], "little")
    header = json.loads(path.read_bytes()[8 : 8 + length])
    assert length % 8 == 0
    assert all(header[name]["data_offsets"][0] % tensor.itemsize == 0 for name, tensor in tensors.items())


# --- resuming -----------------------------------------------------------------------------------------------------

DTYPES_OF_RUNS = ("float32", "bfloat16")
ELSEWHERE = """
import sys
sys.path.insert(0, sys.argv[1])
import test_checkpoint
test_checkpoint.elsewhere(sys.argv[2], int(sys.argv[3]))
"""


@pytest.fixture(
    scope="module",
    params=[pytest.param(7, id="each seventh call"), pytest.param(1, marks=pytest.mark.slow, id="each call")],
)
def other_process(tmp_path_factory, request):
    """Another process resumes saved runs, then kills its children while they save. The outcome of each job."""
    folder = tmp_path_factory.mktemp("elsewhere")
    for dtype in DTYPES_OF_RUNS:
        parts = make_parts(getattr(torch, dtype), step=3)
        train(parts, 3)
        CheckpointStore(folder / dtype).save(3, parts)
    command = [sys.executable, "-c", ELSEWHERE, os.path.dirname(__file__), str(folder), str(request.param)]
    subprocess.run(command, check=True, timeout=500)
    return folder, json.loads((folder / "outcome.json").read_text())


def elsewhere(folder, every):
    torch.set_num_threads(1)
    for dtype in DTYPES_OF_RUNS:
        store, parts = CheckpointStore(f"{folder}/{dtype}"), make_parts(getattr(torch, dtype), seed=50)
        assert restore(manifest.latest(store.folder), parts) == {"step": 3}
        train(parts, 3)
        store.save(6, parts)
    outcome = {}
    for step, critic in ((3, True), (2, False)):
        with tempfile.TemporaryDirectory(dir="/dev/shm" if os.path.isdir("/dev/shm") else folder) as place:
            outcome[step] = kill_everywhere(Path(place), step, critic, every)
    Path(folder, "outcome.json").write_text(json.dumps(outcome))


@pytest.mark.parametrize("dtype", DTYPES_OF_RUNS)
def test_three_steps_and_three_in_another_process_are_six(other_process, dtype):
    folder, _ = other_process
    straight, first, found = (make_parts(getattr(torch, dtype), seed=seed) for seed in (0, 0, 9))
    train(straight, 6)
    train(first, 3)
    restore(folder / dtype / "global_step_6", found)
    assert everything(found) == everything(straight) != everything(first)
    assert found.actor.optimizer.num_steps == 6
    assert all(parameter.dtype == getattr(torch, dtype) for parameter in found.actor.model.parameters())


def test_the_learning_rate_goes_on_where_it_was(store):
    before, after = make_parts(), make_parts(seed=3)
    train(before, 4)
    restore(store.save(4, before), after)
    # Warm-up over two of six steps, then half a cosine over four: two steps into it, at its middle.
    assert after.actor.optimizer.lr == before.actor.optimizer.lr == pytest.approx(1e-2 * 0.5)


def test_another_family_is_restored(store):
    before, after = (make_part(Olmo2Config(**SIZES, tie_word_embeddings=True), seed=seed) for seed in (0, 1))
    train(Parts(before), 2)
    assert everything(Parts(after)) != everything(Parts(before))
    restore(store.save(2, Parts(before)), Parts(after))
    assert everything(Parts(after)) == everything(Parts(before))
    assert after.model.module.get_output_embeddings().weight is after.model.module.get_input_embeddings().weight


def test_a_run_in_float32_goes_on_in_bfloat16_without_rounding_its_masters(store):
    before, after = make_part(), make_part(dtype=torch.bfloat16, seed=3)
    train(Parts(before), 2)
    restore(store.save(2, Parts(before)), Parts(after))
    exact = [parameter.detach() for parameter in before.model.parameters()]
    assert all(map(torch.equal, after.optimizer.masters, exact))
    assert all(map(torch.equal, after.model.parameters(), [weight.bfloat16() for weight in exact]))
    moments = after.optimizer.tensors(after.model)
    assert all(torch.equal(moments[name], value) for name, value in before.optimizer.tensors(before.model).items())


def test_a_run_in_bfloat16_goes_on_in_float32_from_its_masters(store):
    before, after = make_part(dtype=torch.bfloat16), make_part(seed=3)
    train(Parts(before), 2)
    restore(store.save(2, Parts(before)), Parts(after))
    assert all(map(torch.equal, after.model.parameters(), before.optimizer.masters))
    assert any(not torch.equal(weight, weight.bfloat16().float()) for weight in after.model.parameters())
    assert [name for name in after.optimizer.tensors(after.model) if name.startswith("master/")] == []


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_module_keeps_its_memory(store, dtype):
    part = make_part(dtype=dtype)
    before = [parameter.data_ptr() for parameter in part.model.parameters()]
    path = store.save(1, Parts(part))
    restore(path, Parts(part))
    assert [parameter.data_ptr() for parameter in part.model.parameters()] == before


def test_weights_that_were_never_updated_go_on_too(store):
    before, after = make_part(), make_part(seed=2)
    before.model.layers[0].qkv.weight.grad = torch.ones_like(before.model.layers[0].qkv.weight)
    before.optimizer.step(1.0)
    train(Parts(after), 1)
    restore(store.save(1, Parts(before)), Parts(after))
    assert everything(Parts(after)) == everything(Parts(before))
    assert sorted(before.optimizer.tensors(before.model)) == [
        f"{kind}/layers.0.qkv.weight" for kind in ("exp_avg", "exp_avg_sq", "step")
    ]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=4))
@settings(max_examples=20)
def test_any_state_comes_back(tmp_path_factory, state):
    parts = Parts(make_part(trained=False), state=state)
    path = CheckpointStore(tmp_path_factory.mktemp("run")).save(1, parts)
    assert repr(restore(path, parts)) == repr(state)  # the text of a number is exact, and nan equals nan


def test_nothing_is_unpickled(store, monkeypatch):
    parts = [make_parts(), Parts(make_part(Olmo2Config(**SIZES)))]
    paths = [store.save(1, parts[0], keep=True), store.save(2, parts[1])]
    for path in paths:  # not listed, so not looked at
        (path / "actor" / "pytorch_model.bin").write_bytes(pickle.dumps(print))

    def refuse(*arguments, **keywords):
        raise AssertionError("unpickled")

    for owner, name in ((pickle, "load"), (pickle, "loads"), (pickle, "Unpickler"), (torch, "load")):
        monkeypatch.setattr(owner, name, refuse)
    for path, wanted in zip(paths, parts, strict=True):
        restore(path, wanted)


# --- contents -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("contents", "folders", "has_state", "is_resumable"),
    [
        (["model", "optimizer", "extra"], ["actor", "actor_optimizer"], True, True),
        (["model", "optimizer"], ["actor", "actor_optimizer"], True, True),
        (["model", "extra"], ["actor"], True, False),
        (["model"], ["actor"], False, False),
    ],
)
def test_contents_decide_what_is_written(tmp_path, contents, folders, has_state, is_resumable):
    store = CheckpointStore(tmp_path, contents=contents)
    path = store.save(5, make_parts(critic=False, a=1))
    assert [file.name for file in sorted(path.iterdir()) if file.is_dir()] == folders
    assert (path / "trainer_state.json").exists() == has_state
    assert manifest.is_resumable(path) == is_resumable
    assert restore(path, make_parts(critic=False)) == ({"a": 1} if has_state else {})


def test_a_critic_without_its_optimizer_is_not_resumable(tmp_path):
    store = CheckpointStore(tmp_path, critic_contents=["model"])
    path = store.save(1, make_parts())
    assert "critic_optimizer" not in names_in(path) and "actor_optimizer" in names_in(path)
    assert not manifest.is_resumable(path)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_from_a_model_only_checkpoint_the_optimizer_begins_anew_in_its_place(tmp_path, dtype):
    store = CheckpointStore(tmp_path, contents=["model"])
    before, after = make_part(dtype=dtype), make_part(dtype=dtype, seed=1)
    train(Parts(before), 3)
    train(Parts(after), 1)
    restore(store.save(3, Parts(before)), Parts(after))
    weights = before.model.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in after.model.state_dict().items())
    assert all(
        torch.equal(m, p.float()) for m, p in zip(after.optimizer.masters, before.model.parameters(), strict=True)
    )
    assert not after.optimizer.adamw.state and after.optimizer.num_steps == 3


@pytest.mark.parametrize("listed", [[], ["optimizer"], ["model", "weights"]])
@pytest.mark.parametrize("name", ["actor", "critic"])
def test_contents_without_a_model_are_refused(tmp_path, name, listed):
    keywords = {"contents": listed} if name == "actor" else {"critic_contents": listed}
    with pytest.raises(AssertionError, match=name):
        CheckpointStore(tmp_path, **keywords)


def test_the_config_decides(tmp_path):
    words = [
        "trainer.max_actor_ckpt_to_keep=3",
        "trainer.max_critic_ckpt_to_keep=null",
        "actor_rollout_ref.actor.checkpoint.save_contents=[model]",
    ]
    store = CheckpointStore.of(resolve(words, environ={}).config, tmp_path)
    assert store.keep == {"actor": 3, "critic": None}
    assert store.contents == {"actor": ["model"], "critic": ["model", "optimizer", "extra"]}


# --- how many stay ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("keep", "left"), [(1, [5]), (2, [4, 5]), (9, [1, 2, 3, 4, 5]), (None, [1, 2, 3, 4, 5])])
def test_old_ones_are_deleted(tmp_path, keep, left):
    store = CheckpointStore(tmp_path, keep_actor=keep, keep_critic=keep)
    for step in range(1, 6):
        store.save(step, make_parts())
        assert names_in(tmp_path)[-1] == TRACKER and (tmp_path / TRACKER).read_text() == f"{step}\n"
    assert names_in(tmp_path)[:-1] == [f"global_step_{step}" for step in left]


def test_actor_and_critic_have_their_own_number(tmp_path):
    store = CheckpointStore(tmp_path, keep_actor=1, keep_critic=3)
    for step in range(1, 6):
        store.save(step, make_parts())
    assert {path.name: names_in(path) for path in tmp_path.glob("global_step_*")} == {
        "global_step_3": ["critic", "critic_optimizer", "manifest.json", "trainer_state.json"],
        "global_step_4": ["critic", "critic_optimizer", "manifest.json", "trainer_state.json"],
        "global_step_5": [
            "actor", "actor_optimizer", "critic", "critic_optimizer", "manifest.json", "trainer_state.json",
        ],
    }  # fmt: skip
    manifest.check(tmp_path / "global_step_4", every_byte=True)
    assert not manifest.is_resumable(tmp_path / "global_step_4")
    with pytest.raises(OtherModel, match="holds no actor"):
        restore(tmp_path / "global_step_4", make_parts())
    (tmp_path / TRACKER).unlink()
    shutil.rmtree(tmp_path / "global_step_5")
    assert manifest.latest(store.folder) is None


def test_what_is_kept_stays_and_one_to_look_at_is_never_the_latest(tmp_path):
    store = CheckpointStore(tmp_path)
    store.save(1, make_parts(), keep=True)
    store.save(2, make_parts())
    store.save(3, make_parts(), contents=["model"])
    assert (tmp_path / TRACKER).read_text() == "2\n" and manifest.latest(store.folder).name == "global_step_2"
    store.save(4, make_parts())
    assert names_in(tmp_path)[:-1] == ["global_step_1", "global_step_3", "global_step_4"]
    assert manifest.is_resumable(tmp_path / "global_step_1") and not manifest.is_resumable(tmp_path / "global_step_3")
    (tmp_path / TRACKER).unlink()
    shutil.rmtree(tmp_path / "global_step_4")
    assert manifest.latest(store.folder).name == "global_step_1"


@pytest.mark.parametrize("first", ["full", "model"])
def test_a_step_that_is_saved_in_both_ways_is_resumable_and_kept(tmp_path, first):
    store = CheckpointStore(tmp_path)
    ways = {"full": {}, "model": {"contents": ["model"]}}
    for way in (first, "model" if first == "full" else "full"):
        store.save(1, make_parts(), **ways[way])
    assert manifest.is_resumable(tmp_path / "global_step_1")
    assert manifest.latest(store.folder) == tmp_path / "global_step_1"
    store.save(2, make_parts())
    assert names_in(tmp_path)[:-1] == ["global_step_1", "global_step_2"]


def test_a_step_is_saved_again(store):
    store.save(1, make_parts())
    parts, found = make_parts(seed=4), make_parts()
    store.save(1, parts)
    restore(manifest.latest(store.folder), found)
    assert everything(found) == everything(parts)
    assert names_in(store.folder) == ["global_step_1", TRACKER]


@pytest.mark.parametrize("step", [1, 2])
def test_one_that_was_being_replaced_when_the_run_was_killed(tmp_path, step):
    store = CheckpointStore(tmp_path, keep_actor=2, keep_critic=2)
    parts, found = make_parts(), make_parts(seed=3)
    store.save(1, parts).rename(tmp_path / "global_step_1.replaced")
    assert manifest.is_resumable(manifest.latest(store.folder))
    restore(manifest.latest(store.folder), found)
    assert everything(found) == everything(parts)
    store.save(step, make_parts(seed=4))
    assert names_in(tmp_path) == [f"global_step_{number}" for number in range(1, step + 1)] + [TRACKER]


def test_a_later_checkpoint_of_another_past_is_not_deleted(store):
    later = store.save(9, make_parts())
    store.save(5, make_parts())
    assert manifest.latest(store.folder).name == "global_step_5" and later.exists()


def test_what_cannot_be_deleted_stops_nothing(tmp_path, monkeypatch):
    told = []
    store = CheckpointStore(tmp_path, note=told.append)
    store.save(1, make_parts())

    def busy(path, **keywords):
        if "ignore_errors" not in keywords:
            raise OSError(errno.EBUSY, "Device or resource busy", str(path))

    monkeypatch.setattr(shutil, "rmtree", busy)
    store.save(2, make_parts())
    assert manifest.latest(store.folder).name == "global_step_2"
    assert len(told) == 1 and "could not be deleted" in told[0] and "busy" in told[0]
    monkeypatch.undo()
    store.save(3, make_parts())
    assert names_in(tmp_path) == ["global_step_3", TRACKER]


# --- the latest ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    store = CheckpointStore(tmp_path_factory.mktemp("template"), keep_actor=None, keep_critic=None)
    for step in (2, 9, 10):
        store.save(step, make_parts(step=step))
    return store.folder


@pytest.fixture
def three(template, tmp_path):
    return CheckpointStore(shutil.copytree(template, tmp_path / "run"), keep_actor=None, keep_critic=None)


def test_no_checkpoints(tmp_path):
    assert manifest.latest(tmp_path / "nowhere") is None
    (tmp_path / ".global_step_3.part").mkdir()
    (tmp_path / "global_step_x").mkdir()
    (tmp_path / "global_step_4").write_text("a file")
    assert manifest.latest(tmp_path) is None


def test_the_tracker_is_asked_first(three):
    (three.folder / TRACKER).write_text("9")
    assert manifest.latest(three.folder).name == "global_step_9"


@pytest.mark.parametrize("content", [None, "", "ten", "-1", "²", "11", "\x00\xff"])
def test_without_a_good_tracker_the_newest_is_taken(three, content):
    if content is None:
        (three.folder / TRACKER).unlink()
    else:
        (three.folder / TRACKER).write_text(content)
    assert manifest.latest(three.folder).name == "global_step_10"


def test_what_is_being_written_is_never_the_latest(three):
    (three.folder / TRACKER).unlink()
    os.rename(three.folder / "global_step_10", three.folder / ".global_step_10.part")
    assert manifest.latest(three.folder).name == "global_step_9"
    with RunFolder(three.folder).owned():
        assert names_in(three.folder) == [".owner", "global_step_2", "global_step_9"]


@pytest.mark.parametrize("file", ["manifest.json", "actor/model.safetensors", "critic/config.json"])
@pytest.mark.parametrize("how", ["missing", "short"])
def test_a_damaged_one_is_passed_over_and_said(three, file, how):
    path = three.folder / "global_step_10" / file
    if how == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[:-1])
    found, trouble = manifest.find_latest(three.folder)
    assert found.name == "global_step_9"
    assert "names step 10" in trouble and Path(file).name in trouble


# --- damage -------------------------------------------------------------------------------------------------------

FILES = [
    "trainer_state.json", "actor/config.json", "actor/model.safetensors", "actor_optimizer/optimizer.json",
    "actor_optimizer/optimizer.safetensors", "critic/value_head.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("how", ["missing", "short", "longer", "altered", "a folder"])
def test_damage_is_named_and_nothing_is_changed(three, file, how):
    path = three.folder / "global_step_10"
    content = (path / file).read_bytes()
    middle = len(content) // 2
    flipped = content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
    (path / file).unlink()
    if how == "a folder":
        (path / file).mkdir()
    elif how != "missing":
        (path / file).write_bytes({"short": content[:-1], "longer": content + b"0", "altered": flipped}[how])
    parts = make_parts(seed=7)
    before = everything(parts)
    with pytest.raises(Damaged) as caught:
        restore(path, parts)
    words = {"missing": "is missing", "a folder": "is missing", "altered": "has changed"}
    assert file in str(caught.value) and words.get(how, "bytes, not") in str(caught.value)
    assert f"{three.folder / 'global_step_9'} is whole" in str(caught.value)
    assert "resume_from_path" in str(caught.value) and "trainer.resume_mode=disable" in str(caught.value)
    assert everything(parts) == before


@given(st.data())
@settings(max_examples=60)
def test_no_flipped_bit_goes_unseen(whole_checkpoint, data):
    file = data.draw(st.sampled_from(sorted(path for path in whole_checkpoint.rglob("*") if path.is_file())))
    content = bytearray(file.read_bytes())
    place = data.draw(st.integers(0, len(content) - 1))
    content[place] ^= 1 << data.draw(st.integers(0, 7))
    good, before = file.read_bytes(), manifest.check(whole_checkpoint)
    file.write_bytes(content)
    try:
        after = manifest.check(whole_checkpoint, every_byte=True)
        assert file.name == "manifest.json" and after == before, "a blank may change, a value may not"
    except CheckpointError:
        pass
    finally:
        file.write_bytes(good)


@pytest.mark.parametrize(
    ("was", "becomes"),
    [('"keep": false', '"keep": true'), ('"has_state": true', '"has_state": false'), ('"optimizer"', '"optimiser"')],
)
def test_a_manifest_that_was_edited_is_damaged(three, was, becomes):
    path = three.folder / "global_step_10" / "manifest.json"
    assert was in path.read_text()
    path.write_text(path.read_text().replace(was, becomes))
    with pytest.raises(Damaged, match=r"manifest\.json cannot be read \(its checksum differs\)"):
        restore(path.parent, make_parts())


@pytest.fixture(scope="module")
def whole_checkpoint(tmp_path_factory):
    return CheckpointStore(tmp_path_factory.mktemp("whole")).save(1, make_parts())


def test_the_only_one_is_damaged(store):
    path = store.save(1, make_parts())
    (path / "actor" / "model.safetensors").unlink()
    with pytest.raises(Damaged, match=r"Copy it again .* or start in another directory: trainer\.resume_mode=disable"):
        restore(path, make_parts())


def test_what_is_no_checkpoint_is_told_apart(store):
    store.save(1, make_parts())
    foreign = store.folder / "global_step_7"
    foreign.mkdir()
    (foreign / "model_world_size_1_rank_0.pt").write_bytes(b"")
    with pytest.raises(NotACheckpoint, match=r"is not a checkpoint of ragen \(no manifest\.json\)"):
        restore(foreign, make_parts())
    with pytest.raises(NotACheckpoint, match=r"global_step_8 is not a directory\. .*global_step_1 is whole"):
        restore(store.folder / "global_step_8", make_parts())
    assert not manifest.is_resumable(foreign) and not manifest.is_resumable(store.folder / "global_step_8")


def test_a_renamed_checkpoint_is_refused(store):
    path = store.save(1, make_parts())
    with pytest.raises(Damaged, match="was written as global_step_1 and must have that name"):
        restore(path.rename(store.folder / "global_step_100"), make_parts())
    with pytest.raises(NotACheckpoint, match="global_step_<N>"):
        restore((store.folder / "global_step_100").rename(store.folder / "best"), make_parts())


# --- another model ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Qwen2Config(**SIZES | {"hidden_size": 32}, tie_word_embeddings=True), "hidden_size is 16 there and 32 here"),
        (Qwen2Config(**SIZES, tie_word_embeddings=False), "tied_embeddings is True there and False here"),
        # The same shapes of weights, and yet another model.
        (Qwen2Config(**SIZES, tie_word_embeddings=True, rms_norm_eps=1e-5), "norm_eps is 1e-06 there and 1e-05 here"),
        (LlamaConfig(**SIZES, tie_word_embeddings=True), "qkv_bias is True there and False here"),
        (Qwen3Config(**SIZES, tie_word_embeddings=True), "is of another model"),
    ],
)
def test_another_models_checkpoint_is_refused(store, config, message):
    path = store.save(1, make_parts(critic=False))
    part = make_part(config, seed=3)
    before = everything(Parts(part))
    with pytest.raises(OtherModel, match=message) as caught:
        restore(path, Parts(part))
    assert str(path) in str(caught.value) and "set model_path" in str(caught.value)
    assert everything(Parts(part)) == before


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (Olmo2Config(**SIZES, tie_word_embeddings=True), "model_type olmo2"),
        (Qwen3Config(**SIZES, head_dim=4, tie_word_embeddings=True), "qkv_bias is False there"),
    ],
)
def test_the_other_way_round_too(store, config, message):
    path = store.save(1, Parts(make_part(config)))
    with pytest.raises(OtherModel, match=message):
        restore(path, make_parts(critic=False))


def test_a_critic_that_does_not_fit_leaves_the_actor_alone(store):
    path = store.save(1, make_parts())
    config = Qwen2Config(**SIZES | {"num_hidden_layers": 3}, tie_word_embeddings=True)
    parts = Parts(make_part(seed=3), make_part(config, critic=True))
    before = everything(parts)
    with pytest.raises(OtherModel, match="num_layers is 2 there and 3 here"):
        restore(path, parts)
    assert everything(parts) == before


def test_a_checkpoint_without_a_critic_does_not_start_one(store):
    path = store.save(1, make_parts(critic=False))
    with pytest.raises(OtherModel, match="holds no critic"):
        restore(path, make_parts())


def test_an_optimizer_of_other_weights_is_refused(store):
    before, after = make_part(), make_part(seed=1)
    train(Parts(before), 1)
    after.model.embed.weight.requires_grad_(False)
    frozen = MasterAdamW(after.model.parameters(), SETTINGS, 6)
    path = store.save(1, Parts(before))
    with pytest.raises(OtherModel, match=r"exp_avg/embed\.weight is 23 x 16 there and nothing here"):
        restore(path, Parts(Part(after.model, after.config, optimizer=frozen)))


# --- a full disk, a read-only folder ------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path, impatient):
    """A store with one checkpoint, and what its folder holds."""
    store = CheckpointStore(tmp_path / "run")
    store.save(1, make_parts(critic=False))
    return store, contents_of(store.folder)


def contents_of(folder):
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_a_disk_that_is_too_small_is_not_even_begun(saved, monkeypatch):
    store, before = saved
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**9, used=0, free=12_345))
    monkeypatch.setattr(model_folder, "write_tensors", None)
    monkeypatch.setattr(save, "write_tensors", None)
    with pytest.raises(SaveFailed) as caught:
        store.save(2, make_parts())
    message = caught.value.strerror
    assert caught.value.errno == errno.ENOSPC and caught.value.filename == str(store.folder)
    # 5,136 numbers in the actor, 17 more in the critic, and nothing of the optimizers yet.
    num_actor = sum(parameter.numel() for parameter in make_part().model.parameters())
    assert f"it needs {(2 * num_actor + 17) * 4 / 1e3:.1f} kB, and 12.3 kB are free" in message
    assert "the checkpoint of step 2 was not written (No space left on device)" in message
    assert f"{store.folder / 'global_step_1'} is whole: run the same command to resume from it" in message
    assert contents_of(store.folder) == before


def test_a_file_system_that_does_not_tell_its_size_is_tried(saved, monkeypatch):
    store, _ = saved
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=0, used=0, free=0))
    assert store.save(2, make_parts()).name == "global_step_2"


@pytest.mark.parametrize("limit", [0, 100, 5_000, 30_000])
@pytest.mark.parametrize("config", [Qwen2Config, Qwen3Config])
def test_a_write_that_the_system_refuses(saved, limit, config):
    """The system's own limit on the size of files: some write fails, whichever it is."""
    store, before = saved
    parts = Parts(make_part(config(**SIZES)), state={"text": "x" * 200})
    train(parts, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(SaveFailed, match="step 2 was not written") as caught:
            store.save(2, parts)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "global_step_1 is whole" in caught.value.strerror
    assert contents_of(store.folder) == before


@pytest.mark.parametrize(
    ("number", "advice"),
    [(errno.EROFS, "make the file system writable"), (errno.EACCES, "make the directory writable")],
)
def test_a_folder_that_cannot_be_written(saved, monkeypatch, number, advice):
    store, before = saved

    def refuse(path, *arguments, **keywords):
        raise OSError(number, os.strerror(number), str(path))

    monkeypatch.setattr(os, "mkdir", refuse)
    with pytest.raises(SaveFailed, match=advice) as caught:
        store.save(2, make_parts())
    assert caught.value.errno == number and "global_step_1 is whole" in str(caught.value)
    assert contents_of(store.folder) == before


def test_without_an_earlier_checkpoint_the_message_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    with pytest.raises(SaveFailed, match="there is no earlier checkpoint"):
        CheckpointStore(tmp_path / "file" / "run").save(1, make_parts())


CALLS = ["fsync", "rename", "replace", "mkdir"]


@pytest.mark.parametrize("step", [2, 1])
def test_a_failure_at_any_call_loses_nothing(saved, monkeypatch, step):
    """Each call to the system in turn fails once: with step 2 beside the saved one, with step 1 in its place."""
    store, before = saved
    store.note = lambda message: None
    new, whole = make_parts(seed=8, critic=False), shutil.copytree(store.folder, store.folder.with_name("copy"))
    messages, number, has_failed = [], 0, True
    while has_failed:
        shutil.rmtree(store.folder)
        shutil.copytree(whole, store.folder)
        number, num_before = number + 1, len(messages)
        with monkeypatch.context() as patch:
            failed = fail_at(patch, number)
            try:
                store.save(step, new)
            except SaveFailed as error:
                messages.append(str(error))
        has_failed = bool(failed)
        assert manifest.check(manifest.latest(store.folder), every_byte=True).is_resumable
        assert not list(store.folder.glob(".global_step_2.part")) and not list(store.folder.glob(".latest*"))
        if step == 2 and (store.folder / "global_step_2").exists():  # whole: it is the one to resume from
            assert manifest.latest(store.folder).name == "global_step_2"
            assert len(messages) == num_before or "the checkpoint of step 2 was written, but latest_" in messages[-1]
        elif step == 2:
            assert contents_of(store.folder) == before and "step 2 was not written (" in messages[-1]
    assert len(messages) > 15 and all("is whole: run the same command to resume" in message for message in messages)
    assert contents_of(store.folder).keys() == {name.replace("global_step_1", f"global_step_{step}") for name in before}


def fail_at(patch, number):
    """The `number`-th of the calls fails, as by a disk that is full for a moment; the list then has an entry."""
    failed, count = [], 0

    def wrap(real):
        def call(*arguments, **keywords):
            nonlocal count
            count += 1
            if count == number:
                failed.append(real.__name__)
                raise OSError(errno.ENOSPC, "No space left on device")
            return real(*arguments, **keywords)

        return call

    for name in CALLS:
        patch.setattr(os, name, wrap(getattr(os, name)))
    return failed


def test_ctrl_c_leaves_nothing_behind(saved, monkeypatch):
    store, before = saved

    def interrupt(folder, written):
        raise KeyboardInterrupt

    monkeypatch.setattr(manifest, "write_manifest", interrupt)
    with pytest.raises(KeyboardInterrupt):
        store.save(2, make_parts())
    assert contents_of(store.folder) == before


def test_a_state_that_json_cannot_hold_leaves_nothing_behind(saved):
    store, before = saved
    with pytest.raises(TypeError, match="not JSON serializable"):
        store.save(2, make_parts(stop=object()))
    assert contents_of(store.folder) == before


# --- killed -------------------------------------------------------------------------------------------------------

KILLED = 77
EVENTS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "shutil.rmtree", "ragen.fsync"}


@pytest.mark.parametrize("step", ["3", "2"])
def test_killed_anywhere_the_latest_is_whole(other_process, step):
    """Step 3 is written beside step 2, step 2 in the place of step 2."""
    _, outcome = other_process
    assert outcome[step]["troubles"] == []
    assert outcome[step]["num_places"] > 60 and outcome[step]["found"] == ["new", "old"]


def kill_everywhere(folder, step, critic, every):
    """Save over checkpoints of steps 1 and 2, in processes that die at every n-th of their system calls in turn."""
    os.fsync = lambda descriptor: sys.audit("ragen.fsync")  # a dead process loses nothing that a living disk has
    start, work = folder / "start", folder / "work"
    old, new = (make_parts(seed=seed, critic=critic) for seed in (2, 7))
    for number in (1, 2):
        CheckpointStore(start, keep_actor=1, keep_critic=2).save(number, old)
    old_weights = manifest.check(start / "global_step_2").files["actor/model.safetensors"]
    store, place, status = CheckpointStore(work, keep_actor=1, keep_critic=2), 0, KILLED
    outcomes, troubles = set(), []
    while status == KILLED:
        shutil.copytree(start, work)
        place += every
        status = save_in_child(store, step, new, place)
        found = manifest.check(manifest.latest(store.folder), every_byte=True)
        which = "old" if found.files["actor/model.safetensors"] == old_weights else "new"
        outcomes.add(which)
        store.save(8, new)
        left = [name for name in names_in(work) if name not in ("global_step_8", TRACKER)]
        is_done = status == 0 and which == "new"
        if not found.is_resumable or not (status == KILLED or is_done) or len(left) > critic:
            troubles.append([place, status, which, left])
        shutil.rmtree(work)
    return {"num_places": place, "found": sorted(outcomes), "troubles": troubles}


def save_in_child(store, step, parts, place):
    child = os.fork()
    if child == 0:
        count = 0

        def hook(event, arguments):
            nonlocal count
            count += event in EVENTS
            if count == place:
                os._exit(KILLED)  # no handler and no `finally` runs

        sys.addaudithook(hook)
        try:
            store.save(step, parts)
            os._exit(0)
        finally:
            os._exit(1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_nan_weights_are_saved_as_they_are(store):
    part, found = make_part(), make_part(seed=1)
    with torch.no_grad():
        part.model.norm.weight[0] = math.nan
    restore(store.save(1, Parts(part)), Parts(found))
    assert everything(Parts(found)) == everything(Parts(part))
