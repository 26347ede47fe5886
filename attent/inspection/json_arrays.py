"""Arrays of numbers inside JSON: small enough for a page, and read by a few lines of any language.

    {"type": "unit16", "shape": [8, 60, 60], "data": "..."}

`data` is base64 of zlib of the little-endian bytes, plane by plane: first the lowest byte of every number, then the
next, since bytes of one rank resemble each other and become smaller together. `unit16` are whole numbers that stand
for themselves / 65535: weights, told to within 0.8e-5.
"""

from __future__ import annotations

import base64
import binascii
import math
import zlib
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

ArrayType = Literal["unit16", "uint16", "float16", "float32"]
UNIT16_SCALE = 65535
NUMPY_TYPES: dict[str, str] = {"unit16": "<u2", "uint16": "<u2", "float16": "<f2", "float32": "<f4"}
MAX_FLOAT16 = 65280.0  # what float16 holds, also when it is rounded to three digits
MAX_ARRAY_BYTES = 2**31  # bytes of one array; a file that asks for more is no file of ours


class ArrayError(ValueError):
    """An array that cannot be read, in a sentence."""


def pack_array(values: Tensor, array_type: ArrayType, *, drop_low_bit: bool = False) -> dict[str, Any]:
    """`digits`: of float16 only three digits, all that a person reads; the next ones are noise to a compressor."""
    exact = values.detach().cpu().double().numpy()
    if array_type == "unit16":
        exact = np.rint(exact * UNIT16_SCALE)
    elif array_type == "float16":
        exact = exact.clip(-MAX_FLOAT16, MAX_FLOAT16)  # -inf of a mask among them
    flat = np.ascontiguousarray(exact, dtype=NUMPY_TYPES[array_type])
    if drop_low_bit and array_type == "float16":
        bits = flat.view(np.uint16)
        flat = ((bits + 1) & 0xFFFE).view(
            NUMPY_TYPES[array_type]
        )  # to the nearest: a carry goes into the exponent, as it should
    planes = flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes()
    data = base64.b64encode(zlib.compress(planes, 6)).decode("ascii")
    return {"type": array_type, "shape": list(flat.shape), "data": data}


def unpack_array(packed: dict[str, Any]) -> Tensor:
    kind, shape = packed.get("type"), packed.get("shape")
    if (
        kind not in list(NUMPY_TYPES)
        or not isinstance(shape, list)
        or not all(isinstance(n, int) and n >= 0 for n in shape)
    ):
        raise ArrayError(f"an array must have a type of {', '.join(NUMPY_TYPES)} and a shape; get the file again")
    stored = np.dtype(NUMPY_TYPES[kind])
    planes = decompress_bytes(packed.get("data"), math.prod(shape) * stored.itemsize)
    flat = np.frombuffer(planes, np.uint8).reshape(stored.itemsize, -1).T.copy().view(stored).reshape(shape)
    numbers = torch.from_numpy(flat.astype(np.int64 if kind == "uint16" else np.float32))
    return numbers / UNIT16_SCALE if kind == "unit16" else numbers


def decompress_bytes(data: Any, num_bytes: int) -> bytes:
    try:
        if num_bytes > MAX_ARRAY_BYTES:
            raise ValueError
        found = zlib.decompressobj().decompress(base64.b64decode(data, validate=True), num_bytes + 1)
        if len(found) != num_bytes:
            raise ValueError
        return found
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise ArrayError(
            f"an array of {num_bytes:,} bytes is damaged or of another length; get the file again"
        ) from error
