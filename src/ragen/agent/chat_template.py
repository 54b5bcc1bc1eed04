"""A conversation as token ids, from the tokenizer's chat template, one message at a time.

    chat = ChatTemplate(tokenizer)                       # tests the template; raises TemplateError naming the part
    ids = chat.opening_ids(system_text, user_text, "<think>")        # up to and including the forced "<think>"
    ids += reply_ids                                                 # sampled, never rendered again
    ids += chat.closing_ids()                                        # only if the reply has no end-of-turn token
    ids += chat.delta_ids(next_user_text, "<think>")                 # what follows the end-of-turn token

The template is a program, and the model's name says nothing about it. It is rendered once around placeholders and cut
into a scaffold: `head SYSTEM middle USER tail REPLY end_of_turn link USER tail REPLY …`. That is right only if the
template is a plain concatenation, so the constructor renders conversations of every kind both ways. A template that
rewrites earlier messages is rejected: once served, its model would see other conversations than in training.
"""

import re
from functools import lru_cache
from typing import Any

from jinja2 import TemplateError as JinjaError

# The template's text around our messages, besides special tokens, is role names ("system", "[INST] <<SYS>>"). With more
# words than this it adds sentences.
MAX_HEADER_WORDS = 3

SYSTEM, USER, NEXT_USER, REPLY = "SYSTEMPLACEHOLDER", "USERPLACEHOLDER", "NEXTUSERPLACEHOLDER", "REPLYPLACEHOLDER"

# The problem, if a reply of this kind does not come back unchanged.
PROBE_REPLIES = {
    "earlier messages are rewritten": "Left.",
    "the think block of earlier replies is dropped or rewritten": "<think>A wall.</think><answer>Left</answer>",
    "replies without a think block are rewritten": "<answer>Left || Up</answer>",
    "line breaks inside replies are changed": "<think>\nOne.\n\n  Two.\n</think>\n\n<answer> Left </answer>",
    "replies that were cut off are rewritten": "<think>The box is",
}
REPLY_WITH_OUTER_SPACE = "\n <answer>Left</answer> \n"


# Members of a group get the same opening, and often reach the same state again.
NUM_REMEMBERED = 1024


class TemplateError(ValueError):
    """The chat template cannot be used for multi-turn training; the message names the part."""


class ChatTemplate:
    """The tokenizer's chat template, tested, as functions from texts to token ids."""

    def __init__(self, tokenizer: Any):
        self.tokenizer = tokenizer
        if not tokenizer.chat_template:
            raise _refusal(["the tokenizer has no chat template"])
        self.special_ids = {id_ for id_, token in tokenizer.added_tokens_decoder.items() if token.special}
        self.special_tokens = tuple(tokenizer.convert_ids_to_tokens(sorted(self.special_ids)))  # for `parse_reply`
        self._scaffold_cache: dict[tuple[str, ...], list[int]] = {}
        self._encode = lru_cache(NUM_REMEMBERED)(self._encode_uncached)
        self._cut_scaffold()
        problems = [*self._default_text(), *self._rewritten_replies(), *self._wrong_endings()]
        if problems:
            raise _refusal(problems)
        self.trims_replies = self._trims_replies()

    def opening_ids(self, system_text: str, user_text: str, reply_prefix: str) -> list[int]:
        """The start of a conversation, up to and including the forced opening of the first reply."""
        return list(self._encode(self.head, system_text, self.middle, user_text, self.tail + reply_prefix))

    def delta_ids(self, user_text: str, reply_prefix: str) -> list[int]:
        """What follows the end-of-turn token of the last reply, up to and including the next forced opening."""
        # Encoded after the end-of-turn token: some tokenizers treat the start of a text differently.
        ids = self._encode(self.end_of_turn_text + self.link, user_text, self.tail + reply_prefix)
        assert ids[0] == self.end_of_turn_id
        return list(ids[1:])

    def closing_ids(self) -> list[int]:
        """The given tokens that close a reply without an end-of-turn token."""
        return [self.end_of_turn_id]

    # --- tokens -------------------------------------------------------------------------------------------------

    def _encode_uncached(self, *pieces: str) -> tuple[int, ...]:
        """Token ids of scaffold, content, scaffold, content, … scaffold.

        Joined and encoded as one text, as in the model's training. But a content that spells out a special token could
        end the message and open another one: if the special tokens are not those of the scaffold, the contents are
        encoded separately, with all special tokens as plain text.
        """
        ids = self._ids("".join(pieces))
        if self._special(ids) == self._special_of_scaffold(pieces[::2]):
            return tuple(ids)
        return tuple(
            id_ for index, piece in enumerate(pieces) for id_ in self._ids(piece, split_special_tokens=index % 2 == 1)
        )

    def _ids(self, text: str, split_special_tokens: bool = False) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False, split_special_tokens=split_special_tokens)

    def _special(self, ids: list[int]) -> list[int]:
        return [id_ for id_ in ids if id_ in self.special_ids]

    def _special_of_scaffold(self, scaffold: tuple[str, ...]) -> list[int]:
        if scaffold not in self._scaffold_cache:
            self._scaffold_cache[scaffold] = [id_ for text in scaffold for id_ in self._special(self._ids(text))]
        return self._scaffold_cache[scaffold]

    # --- the scaffold -------------------------------------------------------------------------------------------

    def _cut_scaffold(self) -> None:
        """Render once around placeholders: head, middle, tail, end_of_turn_text, link."""
        opening = self._render(SYSTEM, [USER], [], "the system message is refused")
        parts = re.fullmatch(f"(.*){SYSTEM}(.*){USER}(.*)", opening, re.DOTALL)
        if parts is None:
            raise _refusal([f"the system message is not rendered in front of the user's: {opening!r}"])
        self.head, self.middle, self.tail = parts.groups()

        two_turns = self._render(SYSTEM, [USER, NEXT_USER], [REPLY], "a second user message is refused")
        rest = re.fullmatch(f"{re.escape(opening + REPLY)}(.*){NEXT_USER}{re.escape(self.tail)}", two_turns, re.DOTALL)
        if rest is None:
            expected = f"{opening}{REPLY}{NEXT_USER}{self.tail}"
            raise _refusal([f"earlier messages are rewritten: {_difference(expected, two_turns)}"])
        first_id = self._ids(rest[1])[0] if rest[1] else None
        self.end_of_turn_text = self.tokenizer.convert_ids_to_tokens(first_id) if first_id in self.special_ids else ""
        if not self.end_of_turn_text or not rest[1].startswith(self.end_of_turn_text):
            raise _refusal([f"replies are not closed by a special token, but by {rest[1]!r}"])
        assert first_id is not None
        self.end_of_turn_id = first_id
        self.link = rest[1].removeprefix(self.end_of_turn_text)

    def _render(self, system: str, users: list[str], replies: list[str], refused: str) -> str:
        """The template's text of a conversation; it asks for a reply if the user wrote the last message."""
        messages = [{"role": "system", "content": system}]
        for index, user in enumerate(users):
            messages.append({"role": "user", "content": user})
            messages += [{"role": "assistant", "content": reply} for reply in replies[index : index + 1]]
        try:
            return self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=len(users) > len(replies)
            )
        except JinjaError as error:
            raise _refusal([f"{refused}: {error}"]) from error

    def _assemble(self, system: str, users: list[str], replies: list[str]) -> str:
        """The same text, built from the scaffold."""
        text = self.head + system + self.middle + users[0] + self.tail
        for user, reply in zip(users[1:], replies, strict=False):
            text += reply + self.end_of_turn_text + self.link + user + self.tail
        return text

    # --- the tests ----------------------------------------------------------------------------------------------

    def _default_text(self) -> list[str]:
        """Does the template add a sentence to our messages?"""
        for part in (self.head, self.middle, self.tail, self.link):
            words = part
            for token in self.special_tokens:
                words = words.replace(token, " ")
            if len(re.findall(r"\w+", words)) > MAX_HEADER_WORDS:
                return [f"it adds text to our messages: {part!r}"]
        return []

    def _rewritten_replies(self) -> list[str]:
        """Does every kind of reply stay unchanged while the conversation grows over four turns?"""
        problems = []
        for problem, reply in PROBE_REPLIES.items():
            for num_users in (2, 3, 4):
                users = [f"State {index}:\n#_P\n\n  <b>{'Go.' * index}" for index in range(num_users)]
                replies = [reply] * (num_users - 1)
                ours = self._assemble("Play.", users, replies)
                theirs = self._render("Play.", users, replies, "a later user message is refused")
                if ours != theirs:
                    problems.append(f"{problem}: {_difference(ours, theirs)}")
                    break
        # If even the plainest reply changes, there is one cause, and the first probe names it.
        return problems[:1] if len(problems) == len(PROBE_REPLIES) else problems

    def _wrong_endings(self) -> list[str]:
        """Does exactly one special token close every reply, also the last, and do tokens split there?"""
        problems = []
        opening = self._assemble(SYSTEM, [USER], [])
        finished = self._render(SYSTEM, [USER], [REPLY], "a reply is refused")
        ending = finished.removeprefix(opening + REPLY)
        if ending == finished or not ending.startswith(self.end_of_turn_text):
            ours = opening + REPLY + self.end_of_turn_text
            problems.append(f"the last reply is rewritten: {_difference(ours, finished)}")
        elif len(self._special(self._ids(ending))) != 1:
            problems.append(f"a reply is closed by more than one special token: {ending!r}")

        delta = self.delta_ids("Go.", "")
        whole = self._ids(self._assemble("Play.", ["State.", "Go."], ["Left."]))
        if whole[-len(delta) - 1 :] != [self.end_of_turn_id, *delta]:
            problems.append("the text after an end-of-turn token is tokenised differently in a conversation and alone")
        return problems

    def _trims_replies(self) -> bool:
        """Are blanks around a reply removed? Common and harmless: a forced opening leaves none before the reply, and
        blanks that the model samples after its answer stay in our ids."""
        users, replies = ["State.", "Go."], [REPLY_WITH_OUTER_SPACE]
        theirs = self._render("Play.", users, replies, "a later user message is refused")
        if theirs == self._assemble("Play.", users, replies):
            return False
        stripped = self._assemble("Play.", users, [REPLY_WITH_OUTER_SPACE.strip()])
        if theirs != stripped:
            raise _refusal([f"blanks around replies are changed: {_difference(stripped, theirs)}"])
        return True


def _refusal(problems: list[str]) -> TemplateError:
    listed = "".join(f"\n  - {problem}" for problem in problems)
    return TemplateError(
        f"this model's chat template cannot be used for multi-turn training:{listed}\n"
        "Choose another model, or set tokenizer.chat_template (chat_template.jinja in the model's directory) to one "
        "that renders every message unchanged, whatever follows."
    )


def _difference(ours: str, theirs: str, width: int = 40) -> str:
    """Where two texts differ, with some text before it."""
    at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    start = max(0, at - width // 2)
    return f"expected …{ours[start : at + width]!r}…, the template gives …{theirs[start : at + width]!r}…"
