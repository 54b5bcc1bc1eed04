"""The stages of reinforcement learning. The folder and the verb share a name: `ragen.train(...)` can be called too."""

import sys

from ragen import CallableTrain

sys.modules[__name__].__class__ = CallableTrain
