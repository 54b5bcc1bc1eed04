"""Which keys exist, in the tree and on the v1 command line: what each takes, if it has an effect, the nearest name.

is_key("trainer.test_freq"), is_group("trainer"), no_effect("actor_rollout_ref.rollout.n")
"""

from collections.abc import Iterable
from dataclasses import Field
from difflib import get_close_matches
from typing import Any, get_args

from ragen.coerce import convert
from ragen.config import devices, v1
from ragen.config.everyday_names import EVERYDAY_NAMES
from ragen.config.schema import Config
from ragen.config.tree import check_choice, leaves, schema_fields
from ragen.env.base import Tag
from ragen.errors import ConfigError

FIELDS: dict[str, tuple[Field, Any]] = {key: (spec, hint) for key, spec, hint in schema_fields(Config)}
_TAG_FIELDS: dict[str, tuple[Field, Any]] = {key: (spec, hint) for key, spec, hint in schema_fields(Tag)}
_OPEN = ("custom_envs", "ray_kwargs.ray_init")  # users add entries to these


def _parents(keys: Iterable[str]) -> set[str]:
    return {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}


V1_ONLY = {key for key in v1.KEYS if key not in FIELDS}
TREE_GROUPS = _parents(FIELDS)
V1_GROUPS = _parents(v1.KEYS) | {"env", "env.env_kwargs"}
TREE_SECTIONS = {name.partition(".")[0] for name in FIELDS if "." in name} | {"custom_envs"}


def is_tree_key(key: str) -> bool:
    """A leaf or a group of the tree."""
    if key in FIELDS or key in TREE_GROUPS or key.startswith("ray_kwargs.ray_init."):
        return True
    tag_field = key.removeprefix("custom_envs.").partition(".")[2]
    is_field = not tag_field or tag_field in _TAG_FIELDS or tag_field.startswith("env_config.")
    return key.startswith("custom_envs.") and key != "custom_envs." and is_field


def is_key(key: str) -> bool:
    return is_tree_key(key) or v1.is_key(key)


def is_v1_only(key: str) -> bool:
    """A key of the v1 command line that the tree does not have."""
    return v1.is_key(key) and key not in FIELDS


def is_group(key: str) -> bool:
    """A name for several keys: `{…}` sets them one by one."""
    is_tag = key.startswith("custom_envs.") and (key.count(".") == 1 or key.endswith(".env_config"))
    return key in TREE_GROUPS or key in V1_GROUPS or key in _OPEN or is_tag


def example_of(group: str) -> str:
    """A key of a group, for a message."""
    return next((key for key in (*FIELDS, *v1.KEYS) if key.startswith(f"{group}.")), f"{group}.…")


def spec_of(key: str) -> tuple[Field, Any] | None:
    """The field behind a key of the tree and its type; None for settings of environments and of Ray."""
    if key in FIELDS:
        return FIELDS[key]
    return _TAG_FIELDS.get(key.split(".", 2)[2]) if key.startswith("custom_envs.") and key.count(".") == 2 else None


def may_be_null(key: str) -> bool:
    """Whether a group can be left out as a whole."""
    spec = spec_of(key)
    return spec is not None and type(None) in get_args(spec[1])


def takes_text(key: str) -> bool:
    """Whether a typed `1e-3` or `true` is text."""
    spec = spec_of(key)
    hint = v1.KEYS[key].type if key in v1.KEYS else spec[1] if spec else None
    return hint is str or set(get_args(hint)) == {str, type(None)}


def checked(key: str, value: Any, name: str) -> Any:
    """The value of a typed key, converted to the key's type. Errors call the key `name`."""
    spec = spec_of(key)
    if is_reference(value) and key not in V1_ONLY:
        return value  # checked when it is resolved
    if key in (devices.KEY, devices.V1_KEY):
        return devices.normal_list(value, name)
    if key in v1.KEYS:
        return v1.KEYS[key].checked(value, name)
    if spec is None:
        return value  # the environment or Ray checks it
    converted = convert(value, spec[1], name)
    check_choice(converted, spec[0].metadata.get("choices", ()), name)
    return converted


def is_reference(value: Any) -> bool:
    """`${other.key}`, alone or in a list."""
    return any(isinstance(item, str) and "${" in item for item in (value if isinstance(value, list) else [value]))


def targets(key: str) -> tuple[str, ...]:
    """The keys of the tree that a typed key sets."""
    return v1.KEYS[key].targets if key in V1_ONLY else (key,)


def followed_by(key: str) -> set[str]:
    """The keys whose default is the value of this one, directly or through another."""
    direct = {name for name, default in leaves(Config()).items() if f"${{{key}}}" in str(default)}
    return direct.union(*(followed_by(name) for name in direct))


def no_effect(key: str) -> str:
    """Why a key changes nothing; empty where it has an effect."""
    spec = spec_of(key)
    own = spec[0].metadata.get("no_effect", "") if spec else ""
    if key not in v1.KEYS:
        return own
    reasons = [no_effect(target) for target in v1.KEYS[key].targets if target != key] or [""]
    return v1.KEYS[key].no_effect or own or (reasons[0] if all(reasons) else "")


def check_known(key: str, name: str, environment: str | None) -> None:
    if not is_key(key):
        where = "" if name == key else f"{name}: "
        raise ConfigError(f"{where}unknown key {key}{suggest(key, environment)}", key=name, code="unknown-key")


_WITH_UNDERSCORE = {key.replace(".", "_"): key for key in FIELDS if key.count(".") == 1}  # lora_rank is lora.rank


_OWN_NAMES = ("sft", "custom_envs")  # sections whose keys have no everyday names
_V1_NAME = {target: key for key, spec in reversed(v1.KEYS.items()) for target in spec.targets}


def suggest(key: str, environment: str | None) -> str:
    """The nearest known key: first among tag fields, v1 keys or tree keys, whichever the user was typing."""
    section, (parent, _, leaf) = key.partition(".")[0], key.rpartition(".")
    if section == "custom_envs":
        likely = [".".join([*key.split(".")[:2], name]) for name in _TAG_FIELDS]
    elif section in v1.OWN_SECTIONS or (environment and section not in TREE_SECTIONS):
        likely = list(v1.KEYS)
    else:
        likely = list(FIELDS)
    if section != "sft" and leaf in _WITH_UNDERSCORE and leaf not in EVERYDAY_NAMES:
        in_sft = f" (in fine-tuning: sft.training.{leaf})" * (f"sft.training.{leaf}" in FIELDS)
        return f"; did you mean {_WITH_UNDERSCORE[leaf]}?{in_sft}"
    near = _nearest(key, likely) or _nearest(key, [*FIELDS, *v1.KEYS])
    if near:
        return f"; did you mean {near}?"
    siblings = ", ".join(name for name in likely if name.rpartition(".")[0] == parent != "")
    sections = ", ".join(sorted({*TREE_SECTIONS, *v1.OWN_SECTIONS}))
    return f"; there are {siblings}" if siblings else f". Sections: {sections}"


def _nearest(key: str, known: list[str]) -> str | None:
    """A key that does something, but for a slip in a longer name. Of fine-tuning only where the user was typing one."""
    section, (parent, _, leaf) = key.partition(".")[0], key.rpartition(".")
    slips = get_close_matches(key, known, n=1, cutoff=0.92) if "." in key else []
    known = [name for name in known if not no_effect(name)]
    known.sort(key=lambda name: name.startswith("sft.") and section != "sft")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    same_leaf = [name for name in known if name.rpartition(".")[2] == leaf]
    near = (
        [name for sibling, name in siblings.items() if sibling.startswith(leaf)]  # cut short
        or [name for name in same_leaf if parent and name.startswith(f"{section}.")]  # with a level left out
        or slips
        or _everyday(key)
        or [name for sibling, name in siblings.items() if set(leaf.split("_")) <= set(sibling.split("_"))]
        or [siblings[sibling] for sibling in get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
        or get_close_matches(key, known, n=1, cutoff=0.85)
        or sorted(same_leaf, key=lambda name: section not in name)
        or _everyday(key, cutoff=0.8)
        or ([] if siblings else get_close_matches(key, known, n=1, cutoff=0.5))
    )
    return near[0] if near else None


def _everyday(key: str, cutoff: float = 1.0) -> list[str]:
    """The key that goes by another name elsewhere; in the words of the v1 command line if the user types these."""
    section, leaf = key.partition(".")[0], key.rpartition(".")[2]
    if key in EVERYDAY_NAMES:
        names = [key]
    else:
        names = get_close_matches(leaf, () if section in _OWN_NAMES else EVERYDAY_NAMES, n=1, cutoff=cutoff)
    targets = [EVERYDAY_NAMES[name] for name in names]
    return [_V1_NAME.get(target, target) if section in v1.OWN_SECTIONS else target for target in targets]
