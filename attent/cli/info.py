"""`attent info`: describe a model folder on one page: the model, its tokenizer, the progress of its training."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from attent.formatting import escape_invisible

EXIT_FAILED = 1
LABEL_WIDTH, PAGE_WIDTH = 15, 80  # columns


def info(model: Annotated[Path, Parameter(help="a model folder of attent or Hugging Face")]) -> int:
    """Describe a model folder, verify its checksums, and show the progress of its training."""
    from attent.training.folder_info import inspect_folder

    folder = inspect_folder(model)
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(errors="backslashreplace")  # for consoles that cannot show every character
    print("\n".join(line for row in folder.rows for line in format_row(*row)))
    return EXIT_FAILED if folder.problems else 0


def format_row(name: str, text: str) -> Iterator[str]:
    """A label and a text, wrapped at spaces to 80 columns."""
    from rich.console import Console
    from rich.text import Text

    for line in Text(escape_invisible(text)).wrap(Console(), PAGE_WIDTH - LABEL_WIDTH) or [Text()]:
        yield f"{name:<{LABEL_WIDTH}}{line.plain}".rstrip()
        name = ""
