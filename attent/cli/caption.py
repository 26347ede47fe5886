"""`attent caption`: a text for each image. See `attent.decoding.source_search`."""

import json as json_module
import sys
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter

from attent.cli import shared
from attent.decoding.options import DeviceOptions, DtypeName, SearchOptions
from attent.decoding.output_format import replace_line_breaks

UNUSED_OPTIONS = ("n_best", "beam_groups", "diversity_penalty", "prevent_loops")
SEARCH_FLAGS = list(shared.derive_flags(SearchOptions, exclude=UNUSED_OPTIONS))
DerivedFlags: Any = shared.make_flags_class(
    SEARCH_FLAGS, shared.derive_flags(DeviceOptions, exclude=("engine", "batch_tokens"))
)


@dataclass(frozen=True, kw_only=True)
class CaptionFlags(DerivedFlags):  # type: ignore[misc]  # derived from the options
    to: Annotated[str | None, shared.flag("Common", "language, for a model of several")] = None
    output: Annotated[Path | None, shared.flag("Common", "output file; by default stdout", "--output", "-o")] = None
    json: Annotated[bool, shared.flag("Output", "print one JSON object per line")] = False
    max_length: Annotated[int | None, shared.flag("Search", "maximum tokens, by default 100")] = None
    dtype: Annotated[DtypeName | None, shared.flag("Device", "by default float32")] = None


def caption(
    model: Annotated[Path, Parameter(help="a folder of `attent train --task caption`, or a Hugging Face one")],
    /,
    *images: Annotated[Path, Parameter(help="image files, and folders of them", required=True)],
    flags: Annotated[CaptionFlags, Parameter(name="*", show_default=False)] = CaptionFlags(),
) -> int:
    """Caption images: prints the file and the text, separated by a tab.

    attent caption runs/captions photo.jpg
    """
    shared.check_positive("caption", threads=flags.threads)
    with shared.raise_usage_errors("caption"):
        options = SearchOptions(**{name: getattr(flags, name) for name, _, _ in SEARCH_FLAGS})
    from attent.data.images import ImageError, list_images
    from attent.decoding.source_search import Captioner
    from attent.storage.atomic import open_output
    from attent.storage.manifest import check_outputs

    files = [file for name in images for file in list_images(name.expanduser()) or [name]]
    check_outputs([flags.output], [model, *files])
    shared.prepare_loading(model, flags.threads)
    captioner = Captioner.load(model, device=flags.device, dtype=flags.dtype)
    captioner.resolve_language(flags.to)  # fails before images are read
    shared.use_utf8(sys.stdout)
    num_bad = 0
    with nullcontext(sys.stdout) if flags.output is None else open_output(flags.output, shared.print_message) as out:
        for file, result in zip(files, captioner.caption_all(files, options, to=flags.to), strict=True):
            if isinstance(result, ImageError):
                shared.print_message(str(result))
                num_bad += 1
            elif flags.json:
                fields = {"image": str(file), "text": result.text, "score": result.score}
                out.write(json_module.dumps(fields, ensure_ascii=False) + "\n")
            else:
                out.write(f"{file}\t{' '.join(replace_line_breaks(result.text).split())}\n")
            out.flush()
    if num_bad and len(files) > 1:
        shared.print_message(f"{num_bad:,} of {len(files):,} images could not be captioned")
    return 1 if num_bad else 0
