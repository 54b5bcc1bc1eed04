"""Counter-based randomness: a draw is a pure function of its coordinates.

There is no generator state to save, pass around or lock, and a draw is the same in every process and Python version.
Levels come from `(environment, split, seed, attempt)`, the noise of a step from
`(seed, group, member, step)`:

    >>> 0.0 <= uniform("noise", 7, 0, 3, 1) < 1.0
    True
"""

from hashlib import blake2b

Coordinate = int | str


def bits(*coordinates: Coordinate, num_bits: int = 512) -> int:
    """A uniform integer below 2**num_bits (at most 512) that depends only on the coordinates.

    Take small draws from it one after another: `pool, die = divmod(pool, 6)`.
    """
    key = "\x1f".join(map(str, coordinates)).encode()
    return int.from_bytes(blake2b(key, digest_size=num_bits // 8).digest(), "little")


def uniform(*coordinates: Coordinate) -> float:
    """A float in [0, 1) with 53 random bits."""
    return (bits(*coordinates, num_bits=64) >> 11) * 2.0**-53
