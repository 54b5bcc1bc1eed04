"""Packages for a GPU machine that reaches no package index: download them here, carry the folder, put it on its path.

    python benchmarks/gpu/fetch_packages.py                     # into benchmarks/.peers/gpu, which git ignores; 20 MB
    PYTHONPATH=src:benchmarks/.peers/gpu python benchmarks/gpu/grpo_step.py

Hydra and OmegaConf for `ragen train`, TRL and what it imports for the comparison. torch, transformers, accelerate,
numpy, pandas and pyarrow must be there already.
"""

import argparse
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[1] / ".peers" / "gpu"
PACKAGES = ["hydra-core==1.3.8", "omegaconf==2.3.1", "shtab", "trl==1.16.0", "datasets==4.7.0", "dill==0.4.0",
            "multiprocess==0.70.18", "xxhash==3.6.0"]  # fmt: skip
SOURCE_ONLY = ["antlr4-python3-runtime==4.9.3"]  # plain Python, published without a wheel


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version on the GPU machine (default 3.12)")
    parser.add_argument("--folder", type=Path, default=FOLDER)
    options = parser.parse_args()
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--upgrade", "--target", options.folder]
    platforms = [f"--platform={name}_x86_64" for name in ("manylinux_2_28", "manylinux2014")]
    binary = ["--only-binary=:all:", f"--python-version={options.python}", *platforms]
    subprocess.run([*install, *binary, *PACKAGES], check=True)
    subprocess.run([*install, *SOURCE_ONLY], check=True)
    size = sum(path.stat().st_size for path in options.folder.rglob("*") if path.is_file())
    print(f"{options.folder}: {size / 1e6:.0f} MB for Python {options.python}")


if __name__ == "__main__":
    main()
