"""Write values as command-line overrides that Hydra's grammar reads back unchanged.

override("agent_proxy.action_sep", " | ")      # agent_proxy.action_sep=' | '
override("es_manager.val.env_configs.tags", ["A", "B"])     # es_manager.val.env_configs.tags=[A,B]
"""

import re
from typing import Any

_PLAIN = re.compile(r"[A-Za-z_][\w.-]*")
_RESERVED = ("null", "true", "false", "inf", "nan")  # bare, these are not text


def override(key: str, value: Any) -> str:
    """`key=value`, with quotes where the grammar needs them."""
    return f"{key}={text(value)}"


def text(value: Any) -> str:
    """One value: None, a bool, a number, text, or a list or dict of these."""
    if isinstance(value, (list, tuple)):
        return f"[{','.join(map(text, value))}]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{name}:{text(item)}" for name, item in value.items()) + "}"
    if isinstance(value, str):
        is_plain = _PLAIN.fullmatch(value) and value.lower() not in _RESERVED
        return value if is_plain else quoted(value)
    return "null" if value is None else str(value)


def quoted(value: str) -> str:
    """Text in single quotes, whatever it holds. Backslashes are escaped only where they precede a quote."""
    escaped = re.sub(r"(\\*)('|$)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), value)
    return f"'{escaped}'"
