"""The tokenizer of `pocket`: a small vocabulary for boards that can still encode any text.

    tokenizer = make_tokenizer()
    tokenizer.tokenize("#_X__#")            # ['#', '_', 'X', '_', '_', '#']: every cell is a token

The vocabulary is the 256 bytes and the list below; the longest match wins. Nothing is learned from data, every text can
be encoded, and decoding restores it.

Words are added tokens, not BPE merges. `AutoTokenizer` rebuilds the tokenizer of any Qwen2 directory with Qwen's rule
for splitting text; added tokens are matched before that rule applies, so it finds the same tokens. (It also composes
accents as Qwen2's does, Unicode's NFC.)

Boards keep their shape. In a 6x6 room the walls around a line end form one token with it, so the inner cells are rows
of four with one token in between, as in a 4x4 lake: the cell below is always five tokens later.
"""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PADDING, END_OF_TURN = "<|endoftext|>", "<|end|>"
ROLES = ("<|system|>", "<|user|>", "<|assistant|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

TAGS = ("<think>", "</think>", "<answer>", "</answer>", "||", " || ")
BEYOND_ONE_BYTE = ("√", "\n######\n#", "#\n#")  # a cell, the top of a 6x6 room, the wall between two of its rows
# 10 is the number of actions in an episode: one token, so that a tenth action does not shift the text.
NUMBERS = ("10", *(f" {number}" for number in range(11)), *(f" -{number}" for number in range(2)))

# Words that may start a line or a block: with and without a leading blank.
LEADING_WORDS = """
action arm arms box dragon go goal hole holes no phoenix player pull push reward stuck target turn Actions Arms
Available Bandit Box Boxes Coordinates Down FrozenLake Goal Grid Holes Left Map Player Positions Right Sokoban Start
State Symbols Targets The Turn TwoArmedBandit Up You Your Teacher Trader Nurse StartupFounder Librarian Investor
Accountant StockBroker Engineer RealEstateAgent Pharmacist Musician Clerk Freelancer Technician Youtuber Planner
Artist Postman Pilot Banker VentureCapitalist Gardener Cryptominer Receptionist Explorer Archivist Filmmaker
Bookkeeper Consultant SocialWorker Photographer Mechanic GameDesigner Secretary Entrepreneur Cashier DataScientist
CivilServant StartupAccelerator
"""

# Words inside a sentence: only with a leading blank.
INNER_WORDS = """
One Which a above actions again all an and another are at available average away back behind below best better board
boxes but by can cannot cell cells chance choose col cols corner costs do does down each earns empty end ends
episode every everything expect first for form free from frozen game get got grid has have hidden holes ice if in
into is it its keep lake last leave left less likely line lost may more most move moves much must name names never
next not nothing now of off on one only onto or other out pays per plan play points position positions pulled puzzle
pushed rarely reach reply right risky room row rows safe second see single size slip so solve solving stands start
state steadily step steps take targets than that them then there think this thoughts to token tokens top turns two
up use valid walk walking wall walls way what when where which will with within would you your zero
"""


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Build the tokenizer, always the same."""
    special = (PADDING, END_OF_TURN, *ROLES)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())  # one visible character for each byte
    vocabulary = {token: index for index, token in enumerate((*special, *letters))}
    words = [space + word for word in LEADING_WORDS.split() for space in ("", " ")]
    words += [f" {word}" for word in INNER_WORDS.split()]
    pieces = dict.fromkeys((*TAGS, *BEYOND_ONE_BYTE, *NUMBERS, *words))

    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    backend.add_tokens([AddedToken(piece, special=False, normalized=False) for piece in pieces])
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token=PADDING,
        pad_token=PADDING,
        eos_token=END_OF_TURN,
        extra_special_tokens=list(ROLES),
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=2048,
    )
