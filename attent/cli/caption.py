"""`attent caption`: a text for each image. See `attent.decoding.captioner`."""

from __future__ import annotations

import json as json_module
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from cyclopts import CycloptsError, Parameter

from attent.cli.input_texts import prepare_loading
from attent.cli.line_progress import print_message, use_utf8
from attent.cli.search_flags import (
    COMMON_GROUP,
    DEFAULT_BEAM_SIZE,
    DEVICE_GROUP,
    OUTPUT_GROUP,
    SEARCH_GROUP,
    check_positive,
    use_flag_names,
)
from attent.decoding.options import DtypeName, SearchOptions
from attent.decoding.output_format import replace_line_breaks


@dataclass(frozen=True, kw_only=True)
class CaptionFlags:
    to: Annotated[str | None, Parameter(group=COMMON_GROUP, help="language, for a model of several")] = None
    output: Annotated[
        Path | None, Parameter(name=["--output", "-o"], group=COMMON_GROUP, help="output file; by default stdout")
    ] = None
    json: Annotated[bool, Parameter(group=OUTPUT_GROUP, negative="", help="print one JSON object per line")] = False
    beam_size: Annotated[
        int,
        Parameter(
            name=["--beam-size", "-b", "--beam", "--num-beams"],
            group=SEARCH_GROUP,
            help=f"number of beams, by default {DEFAULT_BEAM_SIZE}; 1: greedy search",
        ),
    ] = DEFAULT_BEAM_SIZE
    length_penalty: Annotated[
        float, Parameter(group=SEARCH_GROUP, help="alpha, by default 0.6; larger values favor longer captions")
    ] = SearchOptions.length_penalty
    max_length: Annotated[
        int | None, Parameter(group=SEARCH_GROUP, help="maximum tokens of a caption, by default 100")
    ] = None
    device: Annotated[
        str | None, Parameter(group=DEVICE_GROUP, help="cuda, cuda:1, mps or cpu; by default the fastest available")
    ] = None
    dtype: Annotated[DtypeName, Parameter(group=DEVICE_GROUP, help="by default float32")] = "float32"
    threads: Annotated[int | None, Parameter(group=DEVICE_GROUP, help="CPU threads, by default all cores")] = None


def caption(
    model: Annotated[Path, Parameter(help="a folder of `attent train --task caption`, or a Hugging Face one")],
    images: Annotated[list[Path], Parameter(help="image files", negative_iterable="")],
    /,
    *,
    flags: Annotated[CaptionFlags, Parameter(name="*", show_default=False)] = CaptionFlags(),  # noqa: B008 - frozen
) -> int:
    """Caption images: prints the file and the text, separated by a tab.

    attent caption runs/captions photo.jpg
    """
    check_positive("caption", threads=flags.threads)
    try:
        options = SearchOptions(
            beam_size=flags.beam_size, length_penalty=flags.length_penalty, max_length=flags.max_length
        )
    except ValueError as error:
        raise CycloptsError(msg=use_flag_names(str(error)), command_chain=("caption",)) from error
    from attent.data.images import ImageError
    from attent.decoding.captioner import Captioner
    from attent.storage.atomic import open_output
    from attent.storage.manifest import check_outputs

    check_outputs([flags.output], [model, *images])
    prepare_loading(model, flags.threads)
    captioner = Captioner.load(model, device=flags.device, dtype=flags.dtype)
    captioner.resolve_language(flags.to)  # fails before images are read
    use_utf8(sys.stdout)
    num_bad = 0
    with nullcontext(sys.stdout) if flags.output is None else open_output(flags.output, print_message) as out:
        for file, result in zip(images, captioner.caption_all(images, options, to=flags.to), strict=True):
            if isinstance(result, ImageError):
                print_message(str(result))
                num_bad += 1
            elif flags.json:
                fields = {"image": str(file), "text": result.text, "score": result.score}
                out.write(json_module.dumps(fields, ensure_ascii=False) + "\n")
            else:
                out.write(f"{file}\t{' '.join(replace_line_breaks(result.text).split())}\n")
            out.flush()
    if num_bad:
        print_message(f"{num_bad:,} of {len(images):,} images could not be captioned")
    return 1 if num_bad else 0
