"""Settings for all tests."""

import os

# Before torch is loaded, here and in every process that a test starts. With several threads the matrix library does not
# promise the same bits twice, and on a busy machine they wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from hypothesis import settings

# No deadline: a slow machine is not a bug. Derandomized: a red test is red again on the next run.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
