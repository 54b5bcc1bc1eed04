"""Safetensors files, written as a stream and read as needed.

    size, crc32 = write_tensors(path, model.state_dict())
    stored = TensorFiles([path])                   # a mapping: stored["embed.weight"] is read when it is asked for
    stored.shapes()["embed.weight"]                # (622, 128), without reading it

Tensors go to disk one after the other, from any device: nothing is gathered in memory first, and the checksum of the
file comes for nothing. What goes wrong is an `OSError` with its number.
"""

import json
import os
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

_DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: Mapping[str, Tensor]) -> tuple[int, int]:
    """Write and sync a file; returns its size and CRC-32."""
    # The widest types first, so that every tensor is aligned.
    ordered = sorted(tensors.items(), key=lambda item: (-item[1].itemsize, item[0]))
    header = _header(ordered)
    size, crc32 = len(header), zlib.crc32(header)
    with open(path, "wb") as file:
        file.write(header)
        for _, tensor in ordered:
            content = _content(tensor)
            file.write(content)
            size, crc32 = size + content.nbytes, zlib.crc32(content, crc32)
        file.flush()
        os.fsync(file.fileno())
    return size, crc32


def num_bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())


def _header(ordered: Sequence[tuple[str, Tensor]]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    start = 0
    for name, tensor in ordered:
        stop = start + tensor.nbytes
        entries[name] = {"dtype": _DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _content(tensor: Tensor) -> memoryview:
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


class TensorFiles(Mapping[str, Tensor]):
    """The tensors of several files, each read when it is asked for."""

    def __init__(self, paths: Sequence[Path]):
        self._files: dict[str, safe_open] = {}
        for path in paths:
            file = safe_open(path, framework="pt")
            self._files |= dict.fromkeys(file.keys(), file)

    def __getitem__(self, name: str) -> Tensor:
        return self._files[name].get_tensor(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: tuple(file.get_slice(name).get_shape()) for name, file in self._files.items()}
