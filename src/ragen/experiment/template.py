"""The variables of a run and the templates that are filled with them.

    scope = Scope({"kl": make("coefficient", "0.001", "--kl-values")}, derived={}, config=None)
    scope.fill("sokoban_kl_sweep_{kl:label}")                  # "sokoban_kl_sweep_0001"
    scope.word("actor_rollout_ref.actor.kl_loss_coef={kl}")    # "actor_rollout_ref.actor.kl_loss_coef=0.001"

A derived variable is worked out when it is asked for.
"""

import re
from collections.abc import Callable, Mapping
from decimal import Decimal
from math import prod
from typing import Any

import yaml

from ragen.errors import ConfigError, nearest_of
from ragen.experiment.values import Value, label, number

PLAIN = re.compile(r"[\w./:@+-]*")  # what Hydra's grammar takes without quotes


class ConfigView:
    """`{config:seed.train}`: the value of a key in runs that say `typed` after a start.

    A run's whole config cannot be resolved while its words are being made, so that a key is taken as it was typed, or
    else from the start alone. `read` keeps what was looked up, for comparison with the resolved runs.
    """

    def __init__(self, typed: Mapping[str, str], resolve: Callable[[], Any]):
        self._typed, self._resolve, self._config = typed, resolve, None
        self.read: dict[str, str] = {}

    def __format__(self, key: str) -> str:
        return str(self.at(key))

    def at(self, key: str) -> Any:
        from ragen.config.tree import value_at

        if key in self._typed:
            value = yaml.safe_load(self._typed[key])
        else:
            self._config = self._config or self._resolve()
            value = value_at(self._config, key)
        self.read[key] = str(value)
        return value


class Scope(dict[str, Any]):
    def __init__(self, values: Mapping[str, Any], derived: Mapping[str, dict[str, Any]], config: ConfigView | None):
        super().__init__(values)
        self._derived, self._asked = derived, []
        if config is not None:
            self["config"] = config

    def __missing__(self, name: str) -> Value:
        if name not in self._derived:
            raise ConfigError(f"there is no variable {name!r}{nearest_of(name, [*self, *self._derived])}")
        if name in self._asked:
            raise ConfigError(f"the derived variables {' -> '.join([*self._asked, name])} follow from one another")
        self._asked.append(name)
        text = self._derive(self._derived[name])
        value = Value(text, {"label": label(text)})
        self._asked.remove(name)
        self[name] = value
        return value

    def _derive(self, rule: Mapping[str, Any]) -> str:
        if "product" in rule:
            return str(prod(number(part, "product") for part in self.fill(rule["product"]).split()))
        if "share" in rule:
            share = Decimal(self.fill(rule["share"]))  # exact: 0.29 of 100 is 29
            return str(max(1, int(share * number(f"{self['config']:{rule['of']}}", rule["of"]))))
        text, cases = self.fill(rule["of"]), rule["cases"]
        if text not in cases and "*" not in cases:
            raise ConfigError(f"{rule['of']} is {text!r}, for which there is no case: {', '.join(cases)}")
        return self.fill(cases[text] if text in cases else cases["*"])

    def fill(self, template: str) -> str:
        try:
            return template.format_map(self)
        except ConfigError:
            raise
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"template {template!r}: {error}") from error

    def word(self, template: str) -> str | None:
        """An override with its values, quoted where the grammar needs it; None where its value is empty."""
        word = self.fill(template)
        key, _, value = word.partition("=")
        if not value:
            return None
        if "{" in template and not PLAIN.fullmatch(value):
            value = "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
        return f"{key}={value}"
