"""AdamW that owns float32 weights and writes the module in place, and the schedule of its learning rate.

    optimizer = MasterAdamW(model.parameters(), settings, total_steps)
    optimizer.prepare()
    loss.backward()                              # as often as there are micro-batches
    norm = optimizer.step(max_norm=1.0)          # clips, steps, clears gradients
    optimizer.advance()                          # the schedule, once per training step

    stored = optimizer.tensors(model), optimizer.num_steps
    with optimizer.in_full():                    # the module's weights in float32, for as long as they are read
        from_huggingface(model, weights)
        optimizer.load(model, *stored)           # continues bit for bit

A learning rate of 1e-6 vanishes in bf16: a module in bf16 gets float32 master weights, which are stepped and rounded
into it. Its gradients are added to the masters' as soon as a backward pass has made each, so they are never all in
memory. A float32 module is its own master. On CUDA, AdamW is fused. The schedule counts training steps, not updates:
how many updates a step has depends on what the filter keeps.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from ragen.config.schema import Optimizer as Settings
from ragen.model.pointwise import add_into

COUNT, MOMENTS, MASTER = "step", ("exp_avg", "exp_avg_sq"), "master"  # what AdamW calls its state, and our own


class MasterAdamW:
    def __init__(self, parameters: Iterable[nn.Parameter], settings: Settings, total_steps: int):
        self.parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self.masters = [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for parameter in self.parameters
        ]
        self.settings, self.total_steps = settings, total_steps
        self.num_steps = 0  # training steps behind us
        self.num_updates = 0  # optimizer steps of this process
        betas = (settings.betas[0], settings.betas[1])
        self.is_cuda = bool(self.masters) and all(master.is_cuda for master in self.masters)
        decay, fused = settings.weight_decay, True if self.is_cuda else None
        self.adamw = torch.optim.AdamW(self.masters, settings.lr, betas, weight_decay=decay, fused=fused)
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_fold, master))

    @property
    def lr(self) -> float:
        """The learning rate of this training step."""
        return self.settings.lr * schedule(self.settings, self.num_steps, self.total_steps)

    def prepare(self) -> None:
        """Before the backward passes of a step: on CUDA, gradients get their memory, so that what is free is free."""
        if self.is_cuda:
            self.gradients()

    def collect(self) -> None:
        """Add gradients that no backward pass made to those of the masters."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                _fold(master, parameter)

    def gradients(self) -> list[Tensor]:
        """What was collected, zeros where there is none: every worker has the same list."""
        for master in self.masters:
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return [master.grad for master in self.masters if master.grad is not None]

    def norm(self) -> float:
        """The norm of all gradients together."""
        return float(nn.utils.get_total_norm([master.grad for master in self.masters if master.grad is not None]))

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            parameter.grad = master.grad = None

    def step(self, max_norm: float, norm: float | None = None) -> float:
        """One update from the gradients, clipped; returns their norm before that. `norm` is it, if known already."""
        self.collect()
        norm = self.norm() if norm is None else norm
        nn.utils.clip_grads_with_norm_(self.masters, max_norm, torch.tensor(norm))
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        self.adamw.step()
        with torch.no_grad():
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                if master is not parameter:
                    parameter.copy_(master)
        self.clear()
        self.num_updates += 1
        return norm

    def advance(self) -> None:
        self.num_steps += 1

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Moments, counts of updates and masters, as `<kind>/<name of the parameter>`; nothing is copied.

        A float32 module is its own master: its weights are not listed again. A parameter without an update has none.
        """
        listed: dict[str, Tensor] = {}
        for name, parameter, master in self._named(model):
            listed |= {f"{kind}/{name}": value for kind, value in self.adamw.state.get(master, {}).items()}
            if master is not parameter:
                listed[f"{MASTER}/{name}"] = master.detach()
        return listed

    def shapes(self, model: nn.Module) -> dict[str, tuple[int, ...]]:
        """The name and shape of every tensor that `load` understands."""
        kinds = {name: tuple(parameter.shape) for name, parameter, _ in self._named(model)}
        moments = {f"{kind}/{name}": shape for name, shape in kinds.items() for kind in (*MOMENTS, MASTER)}
        return moments | {f"{COUNT}/{name}": () for name in kinds}

    def load(self, model: nn.Module, stored: Mapping[str, Tensor], num_steps: int) -> None:
        """Load what `tensors` listed. Call it within `in_full`, after the module's weights were read.

        Stored masters win over the module's weights, also where the module is its own master: a bf16 run
        that resumes in float32 keeps its unrounded weights.
        """
        for name, _, master in self._named(model):
            with torch.no_grad():
                if f"{MASTER}/{name}" in stored:
                    master.copy_(stored[f"{MASTER}/{name}"])
            self.adamw.state.pop(master, None)
            if f"{COUNT}/{name}" in stored:
                moments = {kind: stored[f"{kind}/{name}"].to(master, copy=True) for kind in MOMENTS}
                # AdamW keeps its counts on the CPU unless it is fused or capturable.
                on_device = self.adamw.param_groups[0]["fused"] or self.adamw.param_groups[0]["capturable"]
                count = stored[f"{COUNT}/{name}"].to(master.device if on_device else "cpu", copy=True)
                self.adamw.state[master] = {COUNT: count, **moments}
        self.num_steps = num_steps

    @contextmanager
    def in_full(self) -> Iterator[None]:
        """The module holds the masters themselves: what is written into it is not rounded before the end."""
        rounded = [parameter.data for parameter in self.parameters]
        try:
            for parameter, master in zip(self.parameters, self.masters, strict=True):
                parameter.data = master.data
            yield
        finally:
            for parameter, master, weights in zip(self.parameters, self.masters, rounded, strict=True):
                if master is not parameter:
                    parameter.data = weights.copy_(master.data)

    def _named(self, model: nn.Module) -> Iterator[tuple[str, nn.Parameter, Tensor]]:
        names = {parameter: name for name, parameter in model.named_parameters()}
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            yield names[parameter], parameter, master


def _fold(master: Tensor, parameter: nn.Parameter) -> None:
    """Add a gradient to the master's, in float32, and free it."""
    if parameter.grad is not None:
        master.grad = parameter.grad.float() if master.grad is None else add_into(master.grad, parameter.grad)
        parameter.grad = None


def schedule(settings: Settings, step: int, total_steps: int) -> float:
    """The factor on the learning rate at a step: warm-up from 1/n to 1, then constant, linear or cosine decay."""
    num_warmup = settings.lr_warmup_steps
    if num_warmup < 0:
        num_warmup = int(settings.lr_warmup_steps_ratio * total_steps)
    if step < num_warmup:
        return (step + 1) / num_warmup
    done = min(1.0, (step - num_warmup) / max(1, total_steps - num_warmup))
    decays = {"constant": 1.0, "linear": 1.0 - done, "cosine": 0.5 * (1.0 + math.cos(math.pi * done))}
    decay = decays[settings.lr_scheduler_type]
    return settings.min_lr_ratio + (1.0 - settings.min_lr_ratio) * decay
