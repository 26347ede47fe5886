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

Kind = Literal["unit16", "uint16", "float16", "float32"]
UNIT = 65535
STORED: dict[str, str] = {"unit16": "<u2", "uint16": "<u2", "float16": "<f2", "float32": "<f4"}
LARGEST_HALF = 65280.0  # what float16 holds, also when it is rounded to three digits
LARGEST = 2**31  # bytes of one array; a file that asks for more is no file of ours


class ArrayError(ValueError):
    """An array that cannot be read, in a sentence."""


def pack(numbers: Tensor, kind: Kind, *, digits: bool = False) -> dict[str, Any]:
    """`digits`: of float16 only three digits, all that a person reads; the next ones are noise to a compressor."""
    exact = numbers.detach().cpu().double().numpy()
    if kind == "unit16":
        exact = np.rint(exact * UNIT)
    elif kind == "float16":
        exact = exact.clip(-LARGEST_HALF, LARGEST_HALF)  # -inf of a mask among them
    flat = np.ascontiguousarray(exact, dtype=STORED[kind])
    if digits and kind == "float16":
        bits = flat.view(np.uint16)
        flat = ((bits + 1) & 0xFFFE).view(STORED[kind])  # to the nearest: a carry goes into the exponent, as it should
    planes = flat.reshape(-1).view(np.uint8).reshape(-1, flat.itemsize).T.tobytes()
    data = base64.b64encode(zlib.compress(planes, 6)).decode("ascii")
    return {"type": kind, "shape": list(flat.shape), "data": data}


def unpack(packed: dict[str, Any]) -> Tensor:
    kind, shape = packed.get("type"), packed.get("shape")
    if kind not in list(STORED) or not isinstance(shape, list) or not all(isinstance(n, int) and n >= 0 for n in shape):
        raise ArrayError(f"an array must have a type of {', '.join(STORED)} and a shape; get the file again")
    stored = np.dtype(STORED[kind])
    planes = unzipped(packed.get("data"), math.prod(shape) * stored.itemsize)
    flat = np.frombuffer(planes, np.uint8).reshape(stored.itemsize, -1).T.copy().view(stored).reshape(shape)
    numbers = torch.from_numpy(flat.astype(np.int64 if kind == "uint16" else np.float32))
    return numbers / UNIT if kind == "unit16" else numbers


def unzipped(data: Any, size: int) -> bytes:
    try:
        if size > LARGEST:
            raise ValueError
        found = zlib.decompressobj().decompress(base64.b64decode(data, validate=True), size + 1)
        if len(found) != size:
            raise ValueError
        return found
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise ArrayError(f"an array of {size:,} bytes is damaged or of another length; get the file again") from error
