"""What this process may use of its machine.

cores()      # 2.0; a container may allow 0.5
"""

import contextlib
import os
from pathlib import Path


def cores() -> float:
    """The CPU cores that this process may use; a container may allow a part of one."""
    count = float(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
    with contextlib.suppress(OSError, ValueError):
        quota, period = Path("/sys/fs/cgroup/cpu.max").read_text().split()
        if quota != "max":
            count = min(count, int(quota) / int(period))
    return count
