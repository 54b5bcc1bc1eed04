"""A fingerprint of a model's weights, without reading them all.

    digest(Path("models/mine"))                # the same for a copy, even if split into other files

It covers the name, type and shape of each weight, and up to `SAMPLE` bytes from its middle: training changes almost
every number of the weights that it updates.
"""

import hashlib
import json
from pathlib import Path

SAMPLE = 1 << 16


def digest(folder: Path) -> str:
    """Empty for a directory without safetensors files."""
    found = [line for path in folder.glob("*.safetensors") for line in _samples(path)]
    return hashlib.sha256("\n".join(sorted(found)).encode()).hexdigest() if found else ""


def _samples(path: Path) -> list[str]:
    """A line for each weight."""
    samples = []
    with open(path, "rb") as file:
        header_size = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(header_size))
        entries.pop("__metadata__", None)
        for name, entry in entries.items():
            start, stop = entry["data_offsets"]
            size = min(stop - start, SAMPLE)
            file.seek(8 + header_size + start + (stop - start - size) // 2)
            content = hashlib.sha256(file.read(size)).hexdigest()
            samples.append(f"{name} {entry['dtype']} {entry['shape']} {content}")
    return samples
