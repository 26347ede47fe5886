"""Compressed arrays in JSON, easy to decode in any language.

    {"type": "unit16", "shape": [8, 60, 60], "data": "..."}

`data` is base64 of zlib of the little-endian bytes in planes: first the lowest byte of every number, then the next,
which compresses better. `unit16` are integers to be divided by 65535: weights, exact to 0.8e-5.
"""

import base64
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
    try:
        stored = np.dtype(NUMPY_TYPES[packed["type"]])
        planes = np.frombuffer(zlib.decompress(base64.b64decode(packed["data"], validate=True)), np.uint8)
        flat = planes.reshape(stored.itemsize, -1).T.copy().view(stored).reshape(tuple(packed["shape"]))
        if list(flat.shape) != packed["shape"]:  # NumPy replaces negative numbers
            raise ValueError(f"shape {packed['shape']}")
    except (ValueError, KeyError, TypeError, zlib.error) as error:
        raise AttentError(f"an array is damaged ({error}); create the file again") from error
    numbers = torch.from_numpy(flat.astype(np.int64 if packed["type"] == "uint16" else np.float32))
    return numbers / UNIT16_SCALE if packed["type"] == "unit16" else numbers
