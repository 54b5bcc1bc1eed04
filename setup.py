"""Build in a temporary directory, so that `pip install .` leaves nothing in the checkout; see pyproject.toml."""

import atexit
import shutil
import tempfile

from setuptools import setup

work = tempfile.mkdtemp(prefix="ragen-build-")
atexit.register(shutil.rmtree, work, ignore_errors=True)
setup(options={"build": {"build_base": work}, "egg_info": {"egg_base": work}})
