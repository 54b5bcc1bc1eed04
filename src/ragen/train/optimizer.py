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
memory. A float32 module is its own master. On CUDA, AdamW is fused. `offload.py` keeps masters and moments in main
memory. The schedule counts training steps, not updates: how many updates a step has depends on what the filter keeps.
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
        self.masters = self._make_masters()
        self.holders = self._make_holders()  # their `grad` is the sum of a parameter's gradients, in float32
        self.settings, self.total_steps = settings, total_steps
        self.num_steps = 0  # training steps behind us
        self.num_updates = 0  # optimizer steps of this process
        betas = (settings.betas[0], settings.betas[1])
        self.is_cuda = bool(self.parameters) and all(parameter.is_cuda for parameter in self.parameters)
        decay, fused = settings.weight_decay, True if self.is_cuda else None
        self.adamw = torch.optim.AdamW(self.masters, settings.lr, betas, weight_decay=decay, fused=fused)
        for parameter, holder in zip(self.parameters, self.holders, strict=True):
            if holder is not parameter:
                parameter.register_post_accumulate_grad_hook(partial(_fold, holder))

    def _make_masters(self) -> list[Tensor]:
        return [
            parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()
            for parameter in self.parameters
        ]

    def _make_holders(self) -> list[Tensor]:
        return self.masters

    @property
    def lr(self) -> float:
        """The learning rate of this training step."""
        return self.settings.lr * schedule(self.settings, self.num_steps, self.total_steps)

    def prepare(self) -> None:
        """Before the backward passes of a step: on CUDA, gradients and moments get their memory, so that what is free
        then is free."""
        if self.is_cuda:
            self.gradients()
            self._make_moments()

    def _make_moments(self) -> None:
        """As AdamW makes them in its first step."""
        for master in self.masters:
            if not self.adamw.state.get(master):
                count = torch.zeros((), dtype=torch.float32, device=self._count_device(master))
                self.adamw.state[master] = {COUNT: count, **{kind: torch.zeros_like(master) for kind in MOMENTS}}

    def _count_device(self, master: Tensor) -> torch.device | str:
        """AdamW keeps its counts on the CPU unless it is fused or capturable."""
        group = self.adamw.param_groups[0]
        return master.device if group["fused"] or group["capturable"] else "cpu"

    def collect(self) -> None:
        """Add gradients that no backward pass made to those of the masters."""
        for parameter, holder in zip(self.parameters, self.holders, strict=True):
            if holder is not parameter:
                _fold(holder, parameter)

    def gradients(self) -> list[Tensor]:
        """What was collected, zeros where there is none: every worker has the same list."""
        for holder in self.holders:
            if holder.grad is None:
                holder.grad = torch.zeros(holder.shape, device=holder.device)
        return [holder.grad for holder in self.holders if holder.grad is not None]

    def norm(self) -> float:
        """The norm of all gradients together."""
        return float(nn.utils.get_total_norm([holder.grad for holder in self.holders if holder.grad is not None]))

    def clear(self) -> None:
        """Forget the gradients."""
        for parameter, holder in zip(self.parameters, self.holders, strict=True):
            parameter.grad = holder.grad = None

    def step(self, max_norm: float, norm: float | None = None) -> float:
        """One update from the gradients, clipped; returns their norm before that. `norm` is it, if known already."""
        self.collect()
        norm = self.norm() if norm is None else norm
        nn.utils.clip_grads_with_norm_(self.holders, max_norm, torch.tensor(norm))
        for group in self.adamw.param_groups:
            group["lr"] = self.lr
        with torch.no_grad():
            self._update()
        self.clear()
        self.num_updates += 1
        return norm

    def _update(self) -> None:
        """Step the masters, and round them into the module."""
        self.adamw.step()
        for parameter, master in zip(self.parameters, self.masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)

    def advance(self) -> None:
        self.num_steps += 1

    def tensors(self, model: nn.Module) -> dict[str, Tensor]:
        """Moments, counts of updates and masters, as `<kind>/<name of the parameter>`; nothing is copied.

        A float32 module is its own master: its weights are not listed again. A parameter without an update has none.
        """
        listed: dict[str, Tensor] = {}
        for name, parameter, master in self._named(model):
            listed |= {f"{kind}/{name}": value for kind, value in self.adamw.state.get(master, {}).items()}
            if parameter.dtype != torch.float32:
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
                moments = {kind: stored[f"{kind}/{name}"] for kind in MOMENTS}
                count = stored[f"{COUNT}/{name}"].to(self._count_device(master), copy=True)
                self.adamw.state[master] = {COUNT: count, **self._own_moments(master, moments)}
        self.num_steps = num_steps

    def _own_moments(self, master: Tensor, stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Stored moments of a master, where the optimizer keeps its own."""
        return {kind: moment.to(master, copy=True) for kind, moment in stored.items()}

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


def _fold(holder: Tensor, parameter: nn.Parameter) -> None:
    """Add a gradient to the sum of them, in float32, and free it."""
    if parameter.grad is not None:
        holder.grad = parameter.grad.float() if holder.grad is None else add_into(holder.grad, parameter.grad)
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
