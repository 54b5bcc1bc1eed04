"""A run that does not fit into memory: what it used, what to lower, and the overrides that lower it.

    with explained(config, device, folder):
        ...                                        # raises OutOfMemory, whose message is for the user

Three things decide how much is in memory at once: how many sequences an update computes together, how many a pass does
that only scores them, and how long they may get. The first two change nothing but memory and speed.
"""

import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from ragen.config import derive
from ragen.config.schema import Config
from ragen.config.tree import value_at
from ragen.errors import RunFailed
from ragen.model.redo import is_out_of_memory
from ragen.store import manifest as disk

UPDATE = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
CRITIC = "critic.ppo_micro_batch_size_per_gpu"
SCORE = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu"
LENGTH = "actor_rollout_ref.rollout.max_model_len"
REPLY = "actor_rollout_ref.rollout.response_length"
KEYS = {
    UPDATE: "sequences that an update computes together",
    SCORE: "sequences that are scored together",
    LENGTH: "tokens of a sequence, at most",
}
# Of supervised fine-tuning: the first while it learns, the second when the result plays.
SFT_UPDATE, VALIDATION = "sft.training.micro_batch_size", "data.val_batch_size"
SFT_KEYS = {
    SFT_UPDATE: "sequences that an update computes together",
    VALIDATION: "validation levels that are played together",
}
GIB = 2**30


class OutOfMemory(RunFailed):
    """`overrides` make the run use about half."""

    def __init__(self, message: str, overrides: list[str]):
        super().__init__(message)
        self.overrides = overrides


@contextmanager
def explained(config: Config, device: torch.device, folder: Path) -> Iterator[None]:
    """Turn torch's out-of-memory errors into advice. `folder` is the run's."""
    try:
        yield
    except RuntimeError as error:
        if not is_out_of_memory(error):
            raise
        resuming = [] if config.rl_or_sft == "sft" else _resume_overrides(folder)
        raise OutOfMemory(_message(config, device), [*smaller(config), *resuming]) from error


def smaller(config: Config) -> list[str]:
    """Overrides with half the values, where they can be halved."""
    if config.rl_or_sft == "sft":
        return [f"{key}={value_at(config, key) // 2}" for key in SFT_KEYS if (value_at(config, key) or 0) > 1]
    keys = [UPDATE, *([CRITIC] if derive.critic_model(config).needed else []), SCORE]
    if value_at(config, LENGTH) // 2 <= value_at(config, REPLY):
        keys.append(REPLY)  # a prompt needs some of the length too
    return [f"{key}={value_at(config, key) // 2}" for key in [*keys, LENGTH] if value_at(config, key) > 1]


def _message(config: Config, device: torch.device) -> str:
    peak, total = _peak(device)
    held = _held_by_others(device)
    others = f", of which other processes hold {held / GIB:.1f} GiB now" if held > GIB else ""
    taken = f"{peak / GIB:.1f} GiB at the peak, of {total / GIB:.1f} GiB{others}"
    lines = [f"out of memory on {device}: {taken}. Keys to lower:"]
    keys = SFT_KEYS if config.rl_or_sft == "sft" else KEYS
    width = max(len(key) for key in keys)
    lines += [f"  {key:<{width}}  now {value_at(config, key) or 'all':<6} {meaning}" for key, meaning in keys.items()]
    if config.rl_or_sft == "rl" and value_at(config, UPDATE) == value_at(config, SCORE) == 1:
        lines.append("Sequences are computed one by one already: use a smaller model or a device with more memory")
    return "\n".join(lines)


def _peak(device: torch.device) -> tuple[int, int]:
    """The most that was in use, and what there is, in bytes."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device), torch.cuda.get_device_properties(device).total_memory
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024, total


def _held_by_others(device: torch.device) -> int:
    """Bytes in use by other processes; known for a GPU only."""
    if device.type != "cuda":
        return 0
    free, total = torch.cuda.mem_get_info(device)
    return total - free - torch.cuda.memory_reserved(device)


def _resume_overrides(folder: Path) -> list[str]:
    """With other values it is another run: it starts from the last checkpoint of this one."""
    checkpoint = disk.latest(folder)
    if checkpoint is None or not disk.is_resumable(checkpoint):
        return []
    return [f"trainer.resume_from_path={checkpoint}", "trainer.resume_mode=resume_path"]
