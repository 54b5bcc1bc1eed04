"""A chat request, checked field by field.

    request = read_request(b'{"model": "pocket", "messages": [{"role": "user", "content": "hi"}]}')

Nothing is ignored silently: a field that would change the reply and is not supported is refused by name. Besides
OpenAI's fields there are `top_k`, `include_stop_str_in_output`, and `add_generation_prompt` with
`continue_final_message`, by which clients ask for what is always done: a trailing assistant message is continued.
"""

import json
import secrets
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator
from typing_extensions import TypedDict

from ragen.engine.base import Sampling
from ragen.errors import nearest_of
from ragen.prng import bits
from ragen.serve.engine import NO_LIMIT
from ragen.serve.limits import ApiError

MAX_CHOICES = 128
MAX_STOPS, MAX_STOP_LENGTH = 64, 1000
NO_EFFECT = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")


def _join_parts(content: Any) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        texts = [part.get("text") for part in content]
        content = "".join(texts) if all(isinstance(text, str) for text in texts) else None
    if not isinstance(content, str):
        raise ValueError("must be text: this model reads nothing else")
    return content


class Message(TypedDict):
    __pydantic_config__ = ConfigDict(extra="ignore")  # type: ignore[misc]
    role: Annotated[
        Literal["system", "user", "assistant"], BeforeValidator(lambda role: "system" if role == "developer" else role)
    ]
    content: Annotated[str, BeforeValidator(_join_parts)]


class StreamOptions(TypedDict, total=False):
    include_usage: bool


class TextFormat(TypedDict):
    type: Literal["text"]


Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_LENGTH)]


class Unsupported(BaseModel):
    """Fields that are refused unless they state what is done anyway."""

    presence_penalty: float = Field(0, ge=0, le=0)
    frequency_penalty: float = Field(0, ge=0, le=0)
    repetition_penalty: float = Field(1, ge=1, le=1)
    min_p: float = Field(0, ge=0, le=0)
    top_logprobs: float = Field(0, ge=0, le=0)
    logit_bias: dict[str, Any] = Field({}, max_length=0)
    tools: list[Any] = Field([], max_length=0)
    functions: list[Any] = Field([], max_length=0)
    tool_choice: Literal["none", "auto"] = "none"
    response_format: TextFormat = {"type": "text"}
    echo: Literal[False] = False


class ChatRequest(Unsupported, extra="forbid", strict=True):
    model: str
    messages: list[Message] = Field(min_length=1)
    max_tokens: int | None = Field(None, ge=1, le=1 << 31)
    max_completion_tokens: int | None = Field(None, ge=1, le=1 << 31)
    temperature: float = Field(1.0, ge=0, le=100)
    top_p: float = Field(1.0, ge=1e-9, le=1)
    top_k: int = Field(-1, ge=-1, le=1 << 31)
    n: int = Field(1, ge=1, le=MAX_CHOICES)
    seed: int | None = Field(None, ge=-(1 << 63), lt=1 << 63)
    stop: Annotated[list[Stop], BeforeValidator(lambda stop: [stop] if isinstance(stop, str) else stop)] = Field(
        [], max_length=MAX_STOPS
    )
    include_stop_str_in_output: bool = False
    logprobs: bool = False
    stream: bool = False
    stream_options: StreamOptions = {}
    continue_final_message: bool | None = None
    add_generation_prompt: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _leave_out(cls, body: Any) -> Any:
        """Null is the default, and some fields have no bearing on the reply."""
        if not isinstance(body, dict):
            return body
        return {name: value for name, value in body.items() if value is not None and name not in NO_EFFECT}

    def sampling(self) -> Sampling:
        is_greedy = self.temperature == 0
        return Sampling(self.temperature or 1.0, self.top_p, self.top_k, is_greedy, NO_LIMIT, stop_at_answer=False)

    def draw_keys(self) -> list[int]:
        """64 bits for each choice: the first of a seed is the seed itself."""
        if self.seed is None:
            return [secrets.randbits(64) for _ in range(self.n)]
        first = self.seed % (1 << 64)
        return [first, *(bits("serve", first, index, num_bits=64) for index in range(1, self.n))]


def read_request(content: bytes) -> ChatRequest:
    """Raises `ApiError` that names the first wrong field."""
    try:
        request = ChatRequest.model_validate_json(content)
    except ValidationError as error:
        raise _api_error(**error.errors()[0]) from None
    request.max_tokens = request.max_tokens or request.max_completion_tokens
    if request.max_completion_tokens not in (None, request.max_tokens):
        raise ApiError("max_tokens and max_completion_tokens mean the same: keep one of them", "max_tokens")
    continues = request.messages[-1]["role"] == "assistant"
    if not continues and request.add_generation_prompt is False:
        raise ApiError("without a trailing assistant message, add_generation_prompt must be true", "messages")
    if continues and request.continue_final_message is False:
        message = "continue_final_message=false is not supported with a trailing assistant message: it is continued"
        raise ApiError(message, "continue_final_message", "unsupported_parameter")
    return request


def _api_error(type: str, loc: tuple[str | int, ...], msg: str, input: Any, **_: Any) -> ApiError:
    """From an entry of pydantic's `ValidationError.errors()`."""
    if not loc:
        return ApiError("the body must be a JSON object" if type == "model_type" else f"the body is not JSON: {msg}")
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in loc).removeprefix(".")
    if type == "missing":
        return ApiError(f"{param} is missing", param)
    if type == "extra_forbidden":
        known = StreamOptions.__annotations__ if len(loc) > 1 else ChatRequest.__annotations__
        return ApiError(f"unknown field {param!r}{nearest_of(str(loc[-1]), known)}", param, "unknown_parameter")
    given = f"{param}={json.dumps(input, default=str)[:100]}"
    if loc[0] in Unsupported.model_fields:
        return ApiError(f"{given} is not supported", str(loc[0]), "unsupported_parameter")
    return ApiError(f"{given}: {msg.removeprefix('Value error, ').replace('Input should', 'must')}", param)
