"""Reads and writes safetensors files with numpy alone.

Layout: u64 little-endian header length, JSON header, data. Format: https://github.com/huggingface/safetensors
BF16 and F8_E4M3 have no numpy type: they stay raw (uint16, uint8) next to their dtype name, in `Tensor`."""
import json
import os
from collections import namedtuple

import numpy as np

Tensor = namedtuple("Tensor", "dtype data")  # dtype: safetensors name; data: numpy array of the stored elements

RAW = {"F64": np.float64, "F32": np.float32, "BF16": np.uint16, "F8_E4M3": np.uint8, "U8": np.uint8,
       "I32": np.int32, "I64": np.int64}


class Reader:
    """Every tensor of one folder: model.safetensors, or the shards that model.safetensors.index.json names."""

    def __init__(self, folder):
        index = os.path.join(folder, "model.safetensors.index.json")
        self.where = {}
        if os.path.exists(index):
            with open(index, encoding="utf-8") as f:
                names = json.load(f)["weight_map"]
            for file in sorted(set(names.values())):
                self._add(os.path.join(folder, file))
            missing = [n for n, file in names.items() if n not in self.where]
            if missing:
                raise ValueError(f"{index}: {missing[0]} is in no shard")
        else:
            self._add(os.path.join(folder, "model.safetensors"))

    def _add(self, path):
        header, _, start = read_header(path)
        for name, entry in header.items():
            self.where[name] = (path, start, entry)

    def __contains__(self, name):
        return name in self.where

    def __getitem__(self, name):
        path, start, entry = self.where[name]
        return _read(path, start, entry)


def read_header(path):
    with open(path, "rb") as f:
        length = int.from_bytes(f.read(8), "little")
        header = json.loads(f.read(length))
    meta = header.pop("__metadata__", {})
    return header, meta, 8 + length


def _read(path, start, entry):
    kind = RAW[entry["dtype"]]
    begin, end = entry["data_offsets"]
    with open(path, "rb") as f:
        f.seek(start + begin)
        data = np.frombuffer(f.read(end - begin), dtype=kind)
    return Tensor(entry["dtype"], data.reshape(entry["shape"]))


def read(path):
    """(tensors by name, metadata) of one file."""
    header, meta, start = read_header(path)
    return {name: _read(path, start, entry) for name, entry in header.items()}, meta


def write(path, tensors, meta=None):
    """Writes numpy arrays (dtype taken from them) and Tensors. Offsets follow the order given; the header is padded to
    8 bytes with spaces, and each tensor starts at a multiple of its element size because wider types come first."""
    def wrap(t):
        if isinstance(t, Tensor):
            return t
        t = np.asarray(t)
        name = {"float64": "F64", "float32": "F32", "uint8": "U8", "int32": "I32", "int64": "I64"}[t.dtype.name]
        return Tensor(name, t)

    tensors = {name: wrap(t) for name, t in tensors.items()}
    order = sorted(tensors, key=lambda n: -np.dtype(RAW[tensors[n].dtype]).itemsize)
    header, offset = {}, 0
    if meta:
        header["__metadata__"] = {k: str(v) for k, v in meta.items()}
    for name in order:
        t = tensors[name]
        size = t.data.nbytes
        header[name] = {"dtype": t.dtype, "shape": list(t.data.shape), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as f:
        f.write(len(text).to_bytes(8, "little"))
        f.write(text)
        for name in order:
            f.write(np.ascontiguousarray(tensors[name].data).tobytes())
