"""Which keys there are, in both dialects: what each takes, whether it has an effect, and the nearest to a wrong one.

is_key("trainer.test_freq"), is_group("trainer"), no_effect("actor_rollout_ref.rollout.n")
"""

from dataclasses import MISSING, Field
from difflib import get_close_matches
from typing import Any, get_args

from ragen.coerce import convert
from ragen.config import devices, v1
from ragen.config.schema import Config
from ragen.config.tree import check_choice, schema_fields
from ragen.env.base import Tag
from ragen.errors import ConfigError

FIELDS: dict[str, tuple[Field, Any]] = {key: (spec, hint) for key, spec, hint in schema_fields(Config)}
_TAG_FIELDS: dict[str, tuple[Field, Any]] = {key: (spec, hint) for key, spec, hint in schema_fields(Tag)}
_OPEN = ("custom_envs", "ray_kwargs.ray_init")  # their entries are the user's own


def _parents(keys: Any) -> set[str]:
    return {key.rsplit(".", depth)[0] for key in keys for depth in range(1, key.count(".") + 1)}


V1_ONLY = {key for key in v1.KEYS if key not in FIELDS}
TREE_GROUPS = _parents(FIELDS)
V1_GROUPS = _parents(v1.KEYS) | {"env", "env.env_kwargs"}


def is_tree_key(key: str) -> bool:
    """A leaf or a group of the tree."""
    return key in FIELDS or key in TREE_GROUPS or key.startswith("ray_kwargs.ray_init.") or _is_tag_key(key)


def _is_tag_key(key: str) -> bool:
    section, _, rest = key.partition(".")
    tag_field = rest.partition(".")[2]
    known = not tag_field or tag_field in _TAG_FIELDS or tag_field.startswith("env_config.")
    return section == "custom_envs" and rest != "" and known


def is_key(key: str) -> bool:
    return is_tree_key(key) or v1.is_key(key)


def is_group(key: str) -> bool:
    """A name that stands for several keys: `{…}` sets them one by one."""
    is_tag = key.startswith("custom_envs.") and (key.count(".") == 1 or key.endswith(".env_config"))
    return key in TREE_GROUPS or key in V1_GROUPS or key in _OPEN or is_tag


def example_of(group: str) -> str:
    """A key of a group, for a message."""
    return next((key for key in (*FIELDS, *v1.KEYS) if key.startswith(f"{group}.")), f"{group}.…")


def may_be_null(key: str) -> bool:
    """A group that can be left out as a whole."""
    spec = _spec(key)
    return spec is not None and type(None) in get_args(spec[1])


def _spec(key: str) -> tuple[Field, Any] | None:
    if key in FIELDS:
        return FIELDS[key]
    return _TAG_FIELDS.get(key.split(".", 2)[2]) if key.startswith("custom_envs.") and key.count(".") == 2 else None


def takes_text(key: str) -> bool:
    """Whether a typed `1e-3` or `true` is meant as text."""
    spec = _spec(key)
    hint = v1.KEYS[key].type if key in v1.KEYS else spec[1] if spec else None
    return hint is str or set(get_args(hint)) == {str, type(None)}


def checked(key: str, value: Any, name: str) -> Any:
    """The value of a typed key as the type that the key takes. Errors call the key by `name`."""
    spec = _spec(key)
    if is_reference(value) and key not in V1_ONLY:
        return value  # checked when it is resolved
    if key in (devices.KEY, devices.V1_KEY):
        return devices.normal_list(value, name)
    if key in v1.KEYS:
        return v1.KEYS[key].checked(value, name)
    if spec is None:
        return value  # a setting of an environment or of Ray, checked there
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
    direct = {name for name, (spec, _) in FIELDS.items() if f"${{{key}}}" in str(_default(spec))}
    return direct.union(*(followed_by(name) for name in direct))


def _default(spec: Field) -> Any:
    return spec.default if spec.default_factory is MISSING else spec.default_factory()


def no_effect(key: str) -> str:
    """Why a key changes nothing; empty where it does."""
    if key in v1.KEYS:
        reasons = [no_effect(target) for target in v1.KEYS[key].targets if target != key] or [""]
        own = _field_reason(key)
        return v1.KEYS[key].no_effect or own or (reasons[0] if all(reasons) else "")
    return _field_reason(key)


def _field_reason(key: str) -> str:
    spec = _spec(key)
    return spec[0].metadata.get("no_effect", "") if spec else ""


# --- unknown ones -------------------------------------------------------------------------------------------------


def check_known(key: str, name: str, environment: str | None) -> None:
    if not is_key(key):
        where = "" if name == key else f"{name}: "
        raise ConfigError(f"{where}unknown key {key}{suggest(key, environment)}")


_WITH_UNDERSCORE = {key.replace(".", "_"): key for key in FIELDS if key.count(".") == 1}  # lora_rank is lora.rank


def suggest(key: str, environment: str | None) -> str:
    """The nearest right key, looked for first in the dialect that the user typed."""
    section = key.partition(".")[0]
    tree_sections = {name.partition(".")[0] for name in FIELDS if "." in name} | {"custom_envs"}
    if section == "custom_envs":
        dialect = [".".join([*key.split(".")[:2], name]) for name in _TAG_FIELDS]
    elif section in v1.OWN_SECTIONS or (environment and section not in tree_sections):
        dialect = list(v1.KEYS)
    else:
        dialect = list(FIELDS)
    parent, _, leaf = key.rpartition(".")
    if section != "sft" and leaf in _WITH_UNDERSCORE:
        of_tuning = f" (in fine-tuning: sft.training.{leaf})" * (f"sft.training.{leaf}" in FIELDS)
        return f"; did you mean {_WITH_UNDERSCORE[leaf]}?{of_tuning}"
    for known in (dialect, [*FIELDS, *v1.KEYS]):
        near = _nearest(key, known)
        if near:
            return f"; did you mean {near}?"
    siblings = [name for name in dialect if name.rpartition(".")[0] == parent != ""]
    if siblings:
        return f"; there are {', '.join(siblings)}"
    return f". Sections: {', '.join(sorted({*tree_sections, *v1.OWN_SECTIONS}))}"


def _nearest(key: str, known: list[str]) -> str | None:
    section, (parent, _, leaf) = key.partition(".")[0], key.rpartition(".")
    siblings = {name.rpartition(".")[2]: name for name in known if name.rpartition(".")[0] == parent}
    # Cut short or spelt wrongly, at the end; spelt wrongly elsewhere; with a level left out.
    near = (
        [name for sibling, name in siblings.items() if sibling.startswith(leaf)]
        or [siblings[sibling] for sibling in get_close_matches(leaf, siblings, n=1, cutoff=0.6)]
        or get_close_matches(key, known, n=1, cutoff=0.85)
        or sorted((name for name in known if name.rpartition(".")[2] == leaf), key=lambda name: section not in name)
        or ([] if siblings else get_close_matches(key, known, n=1, cutoff=0.5))
    )
    return near[0] if near else None
