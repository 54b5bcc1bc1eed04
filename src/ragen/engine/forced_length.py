"""Reply lengths that are set instead of sampled: to measure speed and memory with weights that never end a reply.

    forced = read_forced_length("100")               # every reply has 100 tokens
    forced = read_forced_length("lognormal:100")     # 100 on average, ragged as real replies are
    forced.tokens(draw_key, at_most=400)

Tokens are sampled as ever, and nothing but the length ends a reply. A ragged length is a hash of the reply's draw key.
"""

import math
import re
from statistics import NormalDist
from typing import NamedTuple

from ragen.prng import bits

SPREAD = 0.6  # the standard deviation of a ragged length's logarithm
FORM = re.compile(r"(lognormal:)?([1-9]\d{0,8})")


class ForcedLength(NamedTuple):
    mean: int
    is_ragged: bool

    def tokens(self, draw_key: int, at_most: int) -> int:
        """The length of the reply whose draws have this key."""
        if not self.is_ragged:
            return min(self.mean, at_most)
        uniform = (bits("reply length", draw_key, num_bits=32) + 0.5) / 2**32
        length = math.exp(math.log(self.mean) - SPREAD**2 / 2 + SPREAD * NormalDist().inv_cdf(uniform))
        return min(max(1, round(length)), at_most)


def read_forced_length(text: str) -> ForcedLength | None:
    """None for an empty text: replies end as they are sampled."""
    if not text:
        return None
    found = FORM.fullmatch(text)
    assert found is not None, f"{text}: checked by config.ranges"
    return ForcedLength(int(found[2]), found[1] is not None)
