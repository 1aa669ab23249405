"""Reads and writes the tensor files of the tests with NumPy alone, so that moekit's own reader is not its own judge."""

import json
import pathlib
import struct

import numpy as np

DTYPES = {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": np.uint16, "I64": np.int64, "I32": np.int32,
          "U8": np.uint8, "F8_E4M3": np.uint8, "F8_E8M0": np.uint8}
NAMES = {np.dtype(np.float64): "F64", np.dtype(np.float32): "F32", np.dtype(np.float16): "F16",
         np.dtype(np.int64): "I64", np.dtype(np.int32): "I32"}


def read_safetensors(path):
    """All tensors by name; bf16 comes as float32."""
    data = pathlib.Path(path).read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = entry["data_offsets"]
        array = np.frombuffer(data[8 + length + begin : 8 + length + end], dtype=DTYPES[entry["dtype"]])
        if entry["dtype"] == "BF16":
            array = (array.astype(np.uint32) << 16).view(np.float32)
        tensors[name] = array.reshape(entry["shape"])
    return tensors


def write_safetensors(path, tensors):
    header, blobs, at = {}, [], 0
    for name, array in tensors.items():
        blob = np.ascontiguousarray(array).tobytes()
        header[name] = {"dtype": NAMES[array.dtype], "shape": list(array.shape), "data_offsets": [at, at + len(blob)]}
        blobs.append(blob)
        at += len(blob)
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    pathlib.Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(blobs))


def row_errors(output, golden):
    """||y - g|| / ||g|| of each row; an exact zero row allows no error."""
    difference = np.linalg.norm(output.astype(np.float64) - golden.astype(np.float64), axis=1)
    norm = np.linalg.norm(golden.astype(np.float64), axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(difference == 0, 0.0, difference / norm)
