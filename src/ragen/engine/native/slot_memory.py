"""How much memory the sampler's slots take, without torch: for graphs that are captured, and for plans made before.

    slot_bytes(shape, num_rows=128, max_tokens=3600, size=2)
    slots_within(shape, 128, 3600, size=2, room=24 * 10**9)      # as many of 128 as fit, at least one; the others wait

Slots are made once, for conversations of the greatest length: growing would move them, and every captured graph with
them. There is one row more than can be used, for padding.
"""

from ragen.protocols import ModelShape

MAX_ROWS = 256  # conversations that an engine samples at once
CUDA_BURST = 8  # tokens between two looks at them
ROW_STEPS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 160, 192, 224, 256)  # rows of a graph
GROWTH = 512  # tokens: a capacity that grew has new addresses, so it grows rarely


def rounded(num_rows: int) -> int:
    """The number of rows of the smallest graph that serves this many."""
    fitting = [step for step in ROW_STEPS if step >= num_rows]
    return fitting[0] if fitting else -(-num_rows // 64) * 64


def capacity(num_tokens: int) -> int:
    """Tokens that a row has room for, when it must hold `num_tokens`."""
    return -(-num_tokens // GROWTH) * GROWTH


def slot_bytes(shape: ModelShape, num_rows: int, max_tokens: int, size: int) -> int:
    """Of keys and values, for conversations of up to `max_tokens`; a burst may go beyond."""
    token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * size
    return (rounded(num_rows) + 1) * capacity(max_tokens + CUDA_BURST) * token


def slots_within(shape: ModelShape, num_rows: int, max_tokens: int, size: int, room: float) -> int:
    """How many of these conversations fit into `room` bytes, at least one."""
    fitting = (rows for rows in range(num_rows, 1, -1) if slot_bytes(shape, rows, max_tokens, size) <= room)
    return next(fitting, 1)
