"""Settings of a run that differ from the defaults: `not_default(leaves(folder.read_config()))`."""

import re
from collections.abc import Mapping
from typing import Any

from ragen.config.schema import Config
from ragen.config.tree import leaves, schema_fields
from ragen.format import short


def not_default(config: Mapping[str, Any]) -> list[tuple[str, Any, str]]:
    """(key, value, default) of every setting that differs and has an effect on this run.

    What only follows another key does not differ; environments that the run does not use have no effect.
    """
    default = leaves(Config())
    without_effect = {key for key, spec, _ in schema_fields(Config) if "no_effect" in spec.metadata}
    used = {tag for split in ("train", "val") for tag in config.get(f"es_manager.{split}.env_configs.tags") or []}
    found = []
    for key, value in config.items():
        if key in without_effect or (key.startswith("custom_envs.") and key.split(".")[1] not in used):
            continue
        if key not in default:
            found.append((key, value, "–"))
        elif (usual := _resolved(default[key], config)) != value:
            found.append((key, value, setting_text(usual)))
    return found


def setting_text(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, list):
        return f"[{', '.join(map(setting_text, value))}]"
    return short(value) if isinstance(value, float) and abs(value) < 1e-3 else str(value)


def _resolved(default: Any, config: Mapping[str, Any]) -> Any:
    """A default with `${other.key}` replaced by what that key is in this run."""
    if isinstance(default, list):
        return [_resolved(item, config) for item in default]
    if not isinstance(default, str) or "${" not in default:
        return default
    whole = re.fullmatch(r"\$\{([^}]+)\}", default)
    if whole:
        return config.get(whole[1])
    return re.sub(r"\$\{([^}]+)\}", lambda match: str(config.get(match[1])), default)
