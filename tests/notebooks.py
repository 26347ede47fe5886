"""Execute the notebooks of docs/ and store their outputs: `make notebooks`, or with names those alone."""

from __future__ import annotations

import base64
import io
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from PIL import Image

DOCS = Path(__file__).parent.parent / "docs"
NOTEBOOKS = tuple(sorted(DOCS.glob("*.ipynb")))


def execute(path: Path, folder: Path) -> NotebookNode:
    """Return the notebook with the outputs of a new kernel, whose files go to `folder`. An error in a cell raises."""
    notebook = nbformat.read(path, as_version=4)
    NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    ).execute()
    return notebook


def normalize(notebook: NotebookNode) -> str:
    """Return the text of the file: without times and versions, the text of each stream in one piece, figures with a
    palette of 256 colors, which take a third of the space."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = merge_streams(cell.outputs)
            for output in cell.outputs:
                if "image/png" in output.get("data", {}):
                    output.data["image/png"] = reduce_colors(output.data["image/png"])
    return nbformat.writes(notebook) + "\n"


def merge_streams(outputs: list[NotebookNode]) -> list[NotebookNode]:
    merged: list[NotebookNode] = []
    for output in outputs:
        if output.output_type == "stream" and merged and merged[-1].get("name") == output.name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def reduce_colors(png: str) -> str:
    image = Image.open(io.BytesIO(base64.b64decode(png)))
    if image.mode == "P":
        return png
    buffer = io.BytesIO()
    image.convert("RGB").quantize(256, dither=Image.Dither.NONE).save(buffer, "PNG", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def main() -> None:
    for path in [DOCS / name for name in sys.argv[1:]] or NOTEBOOKS:
        print(f"executing {path.name}", file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            notebook = execute(path, Path(folder))
        path.write_text(normalize(notebook), encoding="utf-8")


if __name__ == "__main__":
    main()
