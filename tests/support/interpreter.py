"""GPU kernels on a CPU: Triton's interpreter runs them where Triton is installed (`bash test.sh --slow` installs it).

    from interpreter import needs_triton

`tests/conftest.py` switches the interpreter on before anything imports Triton: later it would have no effect.
"""

import importlib.util

import pytest

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
