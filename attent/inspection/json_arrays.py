"""Compressed arrays in JSON, easy to decode in any language.

    {"type": "unit16", "shape": [8, 60, 60], "data": "..."}

`data` is base64 of zlib of the little-endian bytes in planes: first the lowest byte of every number, then the next,
which compresses better. `unit16` are integers to be divided by 65535: weights, exact to 0.8e-5.
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

from attent.storage.errors import AttentError

ArrayType = Literal["unit16", "uint16", "float16", "float32"]
UNIT16_SCALE = 65535
NUMPY_TYPES: dict[str, str] = {"unit16": "<u2", "uint16": "<u2", "float16": "<f2", "float32": "<f4"}
MAX_FLOAT16 = 65280.0  # fits float16 even after rounding
MAX_ARRAY_BYTES = 2**31  # larger arrays are rejected as invalid


def pack_array(values: Tensor, array_type: ArrayType, *, drop_low_bit: bool = False) -> dict[str, Any]:
    """`drop_low_bit`: round float16 to three digits, which compresses better."""
    exact = values.detach().cpu().double().numpy()
    if array_type == "unit16":
        exact = np.rint(exact * UNIT16_SCALE)
    elif array_type == "float16":
        exact = exact.clip(-MAX_FLOAT16, MAX_FLOAT16)  # includes the -inf of masks
    flat = np.ascontiguousarray(exact, dtype=NUMPY_TYPES[array_type])
    if drop_low_bit and array_type == "float16":
        bits = flat.view(np.uint16)
        flat = ((bits + 1) & 0xFFFE).view(NUMPY_TYPES[array_type])  # to nearest; a carry into the exponent is correct
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
        raise AttentError(f"an array must have a type of {', '.join(NUMPY_TYPES)} and a shape; create the file again")
    stored = np.dtype(NUMPY_TYPES[kind])
    planes = decompress_bytes(packed.get("data"), math.prod(shape) * stored.itemsize)
    flat = np.frombuffer(planes, np.uint8).reshape(stored.itemsize, -1).T.copy().view(stored).reshape(shape)
    numbers = torch.from_numpy(flat.astype(np.int64 if kind == "uint16" else np.float32))
    return numbers / UNIT16_SCALE if kind == "unit16" else numbers


def decompress_bytes(data: Any, num_bytes: int) -> bytes:
    try:
        if num_bytes > MAX_ARRAY_BYTES:
            raise ValueError
        content = zlib.decompressobj().decompress(base64.b64decode(data, validate=True), num_bytes + 1)
        if len(content) != num_bytes:
            raise ValueError
        return content
    except (ValueError, TypeError, binascii.Error, zlib.error) as error:
        raise AttentError(
            f"an array of {num_bytes:,} bytes is damaged or has another length; create the file again"
        ) from error
