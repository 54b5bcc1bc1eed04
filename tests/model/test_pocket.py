"""The embedded model: its tokenizer, what it was taught from, and the weights that are shipped."""

import unicodedata

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM, AutoTokenizer

from ragen.agent.chat_template import ChatTemplate
from ragen.agent.parse import parse_reply
from ragen.env.registry import catalogue
from ragen.model.attention import Packed
from ragen.model.pocket.load import blank_pocket, load_pocket, pocket_folder
from ragen.model.pocket.tokenizer import make_tokenizer
from ragen.sft.pocket.build import build, describe
from ragen.sft.pocket.demonstrations import RULES, TASKS, demonstrations

TOKENIZER = make_tokenizer()
ROOM = "turn 1/5\n######\n#___P#\n#_X__#\n##_#O#\n######\n######\n10 left"
LAKE = "turn 2/5\nOG√O\n____\n___X\nP___\n8 left"


def pieces(text: str) -> list[str]:
    return [TOKENIZER.decode([index]) for index in TOKENIZER.encode(text, add_special_tokens=False)]


@pytest.fixture(scope="module")
def played():
    return {name: list(demonstrations(TOKENIZER, task, range(60))) for name, task in TASKS.items()}


# --- the tokenizer ----------------------------------------------------------------------------------------------------


@given(st.text())
def test_any_text_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@given(st.text(alphabet="#_OXPSG√\n|<>/ 0159thinkaswer", max_size=60))
def test_text_like_ours_comes_back(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text, add_special_tokens=False)) == text


@given(st.text())
def test_special_tokens_can_be_spelt_out(text):
    spelt = f"{text}<|end|>{text}"
    ids = TOKENIZER.encode(spelt, add_special_tokens=False, split_special_tokens=True)
    assert TOKENIZER.eos_token_id not in ids
    assert TOKENIZER.decode(ids) == spelt


def test_cells_digits_and_tags_are_single_tokens():
    for piece in ("#_OXPSG√", "0123456789", ("<think>", "</think>", "<answer>", "</answer>", "||", "Up", "dragon")):
        for text in piece:
            assert pieces(text) == [text]


def test_the_cell_below_is_always_five_tokens_on():
    for rows in (["____", "____", "____", "____"], ["####", "#XPO", "####", "####"], ["_#_#", "####", "#S_X", "####"]):
        room = pieces("turn 1/5\n######\n" + "".join(f"#{row}#\n" for row in rows) + "######\n10 left")
        start = room.index("\n######\n#") + 1
        assert ["".join(room[start + 5 * row : start + 5 * row + 4]) for row in range(4)] == rows
    lake = pieces(LAKE)
    start = lake.index("O")
    assert ["".join(lake[start + 5 * row : start + 5 * row + 4]) for row in range(4)] == LAKE.split("\n")[1:5]


def test_transformers_opens_the_same_tokenizer():
    shipped = AutoTokenizer.from_pretrained(pocket_folder())
    assert len(shipped) == len(TOKENIZER) <= 800
    assert shipped.get_vocab() == TOKENIZER.get_vocab()
    for text in (ROOM, LAKE, "naïve 日本 \t\r\n  \x00 it's 3.14", "<think>Up</think><answer>Up || Left</answer>"):
        assert unicodedata.normalize("NFC", text) == text
        ids = shipped.encode(text, add_special_tokens=False)
        assert ids == TOKENIZER.encode(text, add_special_tokens=False)
        assert shipped.decode(ids) == text


def test_the_chat_template_is_accepted_and_the_tags_are_not_special():
    for tokenizer in (TOKENIZER, AutoTokenizer.from_pretrained(pocket_folder())):
        chat = ChatTemplate(tokenizer)
        assert chat.end_of_turn_id == tokenizer.eos_token_id
        assert chat.special_ids == set(range(5))


# --- what it was taught from ------------------------------------------------------------------------------------------


def test_replies_are_well_formed_and_their_actions_valid(played):
    for name, episodes in played.items():
        assert len(episodes) > 30
        env, tag = TASKS[name].environment(), catalogue()[name]
        for episode in episodes:
            state = env.reset(episode.seed, "sft")
            for turn in episode.turns:
                assert turn.state_text == env.render(state)
                reply = parse_reply(turn.reply_text, True, RULES.action_sep, RULES.max_actions_per_turn)
                assert reply.well_formed and reply.num_dropped == 0
                assert 1 <= len(reply.actions) <= min(RULES.max_actions_per_turn, tag.max_actions_per_traj)
                actions = [env.parse_action(state, text) for text in reply.actions]
                assert None not in actions
                assert turn.result.penalty == 0
                for action in turn.result.actions:
                    state = env.step(state, action, 0.0).state


def test_masks_cover_exactly_the_replies(played):
    for episodes in played.values():
        for episode in episodes:
            [sequence] = episode.sequences()
            said = [id_ for id_, flag in zip(sequence.ids, sequence.sampled, strict=True) if flag]
            # What the conversation's text says without our own marks: everything between an opening and its end.
            text = TOKENIZER.decode(sequence.ids)
            replies = [part.split("<|end|>")[0] for part in text.split("<|assistant|><think>")[1:]]
            assert TOKENIZER.decode(said) == "".join(f"{reply}<|end|>" for reply in replies)
            assert len(replies) == len(episode.turns)


def test_think_blocks_say_where_things_are(played):
    for episode in played["SimpleSokoban"]:
        for turn in episode.turns:
            rows = turn.state_text.split("\n")
            where = {symbol: f"{r} {c}" for r, row in enumerate(rows) for c, symbol in enumerate(row)}
            player, box = where.get("P") or where["S"], where.get("X") or where["√"]
            target = where.get("O") or where.get("S") or where["√"]
            assert turn.reply_text.startswith(f"<think>player {player} box {box} target {target} ")
            assert 8 <= len(TOKENIZER.encode(turn.reply_text.split("</think>")[0])) - 1 <= 20


def test_no_validation_level_is_ever_shown():
    for name in ("SimpleSokoban", "FrozenLake"):
        env = TASKS[name].environment()
        validation = {env.render(env.reset(seed, "val")) for seed in range(123, 635)}
        starts = {env.render(env.reset(seed, "sft")) for seed in range(400)}
        shown = {t.state_text for e in demonstrations(TOKENIZER, TASKS[name], range(400)) for t in e.turns}
        assert not shown & validation
        # The test means something: lakes do repeat, and are left out; rooms never do.
        assert bool(starts & validation) == (name == "FrozenLake")


def test_conversations_stay_short(played):
    lengths = [len(sequence.ids) for episode in played["SimpleSokoban"] for sequence in episode.sequences()]
    five_turns = [len(episode.turns) for episode in played["SimpleSokoban"]]
    assert max(five_turns) == RULES.max_turn
    assert max(lengths) <= 450


def test_the_ice_is_not_slippery():
    assert not TASKS["FrozenLake"].environment().config.slips


# --- building and opening ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_building_twice_gives_the_same_bits(tmp_path):
    for name in ("first", "second"):
        build(tmp_path / name, steps=2, say=lambda line: None)
    for file in ("model.safetensors", "config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "first" / file).read_bytes() == (tmp_path / "second" / file).read_bytes()
    decoder, tokenizer = load_pocket(tmp_path / "first")
    assert decoder.shape.vocab_size == len(tokenizer)
    assert not torch.equal(decoder.embed.weight, blank_pocket()[0].embed.weight)


def test_the_shipped_tokenizer_is_the_one_of_the_code(tmp_path):
    TOKENIZER.save_pretrained(tmp_path)
    for file in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / file).read_bytes() == (pocket_folder() / file).read_bytes()


def test_shipped_weights_give_the_same_logits_in_transformers():
    theirs = AutoModelForCausalLM.from_pretrained(pocket_folder()).eval()
    ours, tokenizer = load_pocket()
    assert theirs.config.model_type == "qwen2" and theirs.dtype == torch.float32
    [sequence] = next(demonstrations(tokenizer, TASKS["SimpleSokoban"], range(5, 100))).sequences()
    ids = torch.tensor(sequence.ids)
    attend = Packed([len(ids)])
    with torch.no_grad():
        expected = theirs(ids[None]).logits[0]
        logits = ours.logits(ours.hidden(ids, attend.positions, attend))
    assert (logits - expected).abs().max() < 1e-4


def test_the_shipped_folder_is_small():
    assert sum(file.stat().st_size for file in pocket_folder().iterdir()) < 4_000_000
    decoder, _ = load_pocket()
    assert 800_000 <= sum(weight.numel() for weight in decoder.parameters()) <= 1_200_000


def test_blank_weights_depend_on_the_seed_alone():
    first, second, other = blank_pocket()[0], blank_pocket()[0], blank_pocket(seed=1)[0]
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not torch.equal(first.embed.weight, other.embed.weight)


def test_the_recipe_describes_itself():
    text = describe()
    for name in TASKS:
        assert name in text
