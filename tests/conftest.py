"""Settings for all tests."""

from hypothesis import settings

# No deadline: a slow machine is not a bug. Derandomized: a red test is red again on the next run.
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci")
