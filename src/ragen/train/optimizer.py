"""AdamW that owns float32 weights and writes the module in place, and the schedule of its learning rate.

    optimizer = MasterAdamW(model.parameters(), settings, total_steps)
    loss.backward()
    norm = optimizer.step(max_norm=1.0)          # clips, steps, clears gradients
    optimizer.advance()                          # the schedule, once per training step

A learning rate of 1e-6 vanishes in bf16: a module in bf16 gets float32 master weights, which are stepped and rounded
into it. A float32 module is its own master. The schedule counts training steps, not updates: how many updates a step
has depends on what the filter keeps.
"""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from ragen.config.schema import Optimizer as Settings


class MasterAdamW:
    def __init__(self, parameters: Iterable[nn.Parameter], settings: Settings, total_steps: int):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for parameter in self.parameters
        ]
        self.settings, self.total_steps = settings, total_steps
        self.num_steps = 0  # training steps behind us
        self.adamw = torch.optim.AdamW(
            self.masters, lr=settings.lr, betas=tuple(settings.betas), weight_decay=settings.weight_decay
        )

    @property
    def lr(self) -> float:
        """The learning rate of this training step."""
        return self.settings.lr * schedule(self.settings, self.num_steps, self.total_steps)

    def step(self, max_norm: float) -> float:
        """One update from the module's gradients; returns their norm before clipping."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float()
        norm = nn.utils.clip_grad_norm_(self.masters, max_norm)
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
                parameter.grad = master.grad = None
        return float(norm)

    def advance(self) -> None:
        self.num_steps += 1

    def state(self) -> dict[str, Any]:
        return {"adamw": self.adamw.state_dict(), "masters": self.own_masters(), "num_steps": self.num_steps}

    def own_masters(self) -> list[Tensor]:
        """The masters that are not the module's own weights."""
        pairs = zip(self.parameters, self.masters, strict=True)
        return [master for parameter, master in pairs if master is not parameter]


def schedule(settings: Settings, step: int, total_steps: int) -> float:
    """The factor on the learning rate at a step: warm-up from 1/n to 1, then constant, linear or cosine decay."""
    num_warmup = settings.lr_warmup_steps
    if num_warmup < 0:
        num_warmup = int(settings.lr_warmup_steps_ratio * total_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
    decay = {
        "constant": 1.0,
        "linear": 1.0 - done,
        "cosine": 0.5 * (1.0 + math.cos(math.pi * done)),
    }[settings.lr_scheduler_type]
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * decay
