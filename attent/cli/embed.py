"""`attent embed`: texts as vectors, into a file of numbers or as lines of JSON. The vectors are
`attent.decode.reader`'s."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import CycloptsError, Parameter

from attent.cli.reading_text import OUTPUT, TEXTS, ReadFlags, blocks_of, check_flags, reader_of, say, write

if TYPE_CHECKING:
    from torch import Tensor

ENDINGS = (".npy", ".safetensors")


@dataclass(frozen=True, kw_only=True)
class Flags(ReadFlags):
    """What may be asked for; each field is a flag of the command."""

    out: Annotated[
        Path | None,
        Parameter(
            name=["--output", "-o"], group=OUTPUT, help="a file for the vectors, (N, width): .npy or .safetensors"
        ),
    ] = None
    pooling: Annotated[Literal["mean", "class"], Parameter(help="the mean of all tokens, or the first one, [CLS]")] = (
        "mean"
    )
    normalise: Annotated[
        bool, Parameter(name=["--normalise", "--normalize"], negative="", help="to length 1: products are cosines")
    ] = False


def embed(
    model: Annotated[Path, Parameter(help="a model folder, ours or Hugging Face's")],
    texts: Annotated[list[str] | None, Parameter(help=f"{TEXTS}; of a model of images, their files")] = None,
    /,
    *,
    flags: Annotated[Flags, Parameter(name="*", show_default=False)] = Flags(),  # noqa: B008 - frozen
) -> None:
    """Turn texts into vectors, to compare and to search with.

    attent embed runs/mlm lines.txt --output vectors.npy
    """
    check_usage(flags)
    import torch

    from attent.models import Vision

    reader = reader_of(model, flags)
    vectors = [torch.empty(0, reader.width)]
    texts = texts or []
    for block in [texts] if isinstance(reader.model, Vision) and texts else (one.texts for one in blocks_of(texts)):
        found = reader.embed(block, flags.pooling, flags.normalise)
        if flags.json:
            for text, vector in zip(block, found.tolist(), strict=True):
                write(json.dumps({"text": text, "vector": [round(x, 6) for x in vector]}, ensure_ascii=False))
        if flags.out is not None:
            vectors.append(found)
    if flags.out is not None:
        whole = torch.cat(vectors)
        save(whole, flags.out.expanduser())
        count = f"{len(whole):,} vector{'' if len(whole) == 1 else 's'}"
        say(f"{count} of {whole.shape[1]:,} numbers {'is' if len(whole) == 1 else 'are'} in {flags.out}")


def check_usage(flags: Flags) -> None:
    check_flags(flags, "embed")
    problem = None
    if flags.out is None and not flags.json:
        problem = "vectors are for a file: name one with --output vectors.npy, or ask for --json"
    elif flags.out is not None and flags.out.suffix not in ENDINGS:
        problem = f"--output must end in {' or '.join(ENDINGS)}, but is {flags.out}"
    elif flags.out is not None and not flags.out.expanduser().absolute().parent.is_dir():
        problem = f"{flags.out}: must be in a folder that is there, but is not; make the folder first"
    if problem:
        raise CycloptsError(msg=problem, command_chain=("embed",))


def save(vectors: Tensor, path: Path) -> None:
    """Written aside and renamed: a file that is there is whole."""
    import numpy as np
    from safetensors.torch import save_file

    aside = path.with_name(f".{path.name}.part{path.suffix}")
    if path.suffix == ".npy":
        np.save(aside, vectors.numpy(), allow_pickle=False)
    else:
        save_file({"vectors": vectors.contiguous()}, aside)
    os.replace(aside, path)
