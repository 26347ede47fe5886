"""The pages of docs/: their code runs, their links lead somewhere, and the site builds.

Blocks run in one folder per page, from top to bottom, inside this process (importing torch for each command would take
minutes). A small model with random weights has all the names that the pages use for a translation model.
"""

from __future__ import annotations

import contextlib
import inspect
import io
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import attent
from attent.cli import COMMANDS, main, make_app
from attent.models.weights import save_model
from docs.docstrings import convert_docstring
from docs.site_pages import iterate_reference
from tests.code_blocks import PYTHON, check_block, read_blocks, read_commands, split_pipeline

ROOT = Path(__file__).resolve().parent.parent
PAGES = sorted(path.name for path in (ROOT / "docs").glob("*.md"))
SLOW_PAGES = ("inspection.md", "translating.md")  # half a minute together
MODELS = ("M", "M2", "runs/en-de")
PAIRS = (
    ("A man rides a bike.", "Ein Mann fährt Rad."),
    ("A dog runs.", "Ein Hund rennt."),
    ("Two men.", "Zwei Männer."),
)
TABLE = "en\tde\n" + "".join(f"{source}\t{target}\n" for source, target in PAIRS)
FILES = {
    "text.txt": "".join(f"{source}\n" for source, _ in PAIRS),
    "out.txt": "".join(f"{target}\n" for _, target in PAIRS),
    **dict.fromkeys(("corpus.tsv", "test.tsv", "valid.tsv", "gold.tsv"), TABLE),
    "gold.wa": "0-0 1-1\n" * len(PAIRS),
    "products.csv": "title,long description,price\nA man.,Two dogs in the snow.,12\n",
    "page.json": '{"id": 1, "text": {"title": "A man.", "body": "Two dogs in the snow."}}\n',
    "messages.po": 'msgid ""\nmsgstr "Content-Type: text/plain; charset=UTF-8\\n"\n\nmsgid "A man."\nmsgstr ""\n',
    "page.html": "<title>A man</title><p>A <b>man</b> rides.",
    "project.xlf": (
        '<xliff version="1.2" xmlns="urn:oasis:names:tc:xliff:document:1.2"><file source-language="en" '
        'target-language="de" original="a" datatype="plaintext"><body><trans-unit id="1"><source>A man.</source>'
        "</trans-unit></body></file></xliff>"
    ),
}


LINK = re.compile(r"\]\((?![a-z]+:)([^)#\s]*)(#[^)\s]*)?\)")
# What a browser loads by itself: scripts, images, frames, styles, fonts.
EXTERNAL = re.compile(r"""(?:\bsrc=|<link[^>]*\bhref=|url\(|@import )["']?((?:https?:)?//[^"')\s]+)""")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the files that the pages name."""
    folder = tmp_path_factory.mktemp("workplace")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    save_example_model(folder / "M")
    for name in MODELS[1:]:
        shutil.copytree(folder / "M", folder / name)
    (folder / "trace.json").write_text(attent.look(folder / "M", "one").to_json(), encoding="utf-8")
    return folder


def save_example_model(folder: Path) -> None:
    """Save a model of three layers with random weights and the tokenizer of the committed example."""
    example = ROOT / "tests" / "models" / "saved_model"
    config = attent.load(example).config
    encoder, decoder = (replace(stack, layers=3) for stack in (config.encoder, config.decoder))
    model = attent.build(replace(config, encoder=encoder, decoder=decoder))
    save_model(model, folder, {"tokenizer.model": (example / "tokenizer.model").read_bytes()})


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=pytest.mark.slow) if page in SLOW_PAGES else page for page in PAGES]
)
def test_code_of_the_documentation_runs(
    page: str, workplace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(workplace, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    for block in read_blocks((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if not block.is_run:
            check_block(block)
        elif block.language in PYTHON:
            code = compile("\n" * block.line + block.text, f"docs/{page}", "exec")
            exec(code, {"__name__": "__main__"})
        else:
            for command in read_commands(block):
                run_command(command, f"docs/{page}, line {block.line}", monkeypatch)


def run_command(command: str, location: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run a pipeline, `attent` in this process."""
    stream = b""
    for words in split_pipeline(command):
        target = words[words.index(">") + 1] if ">" in words else None
        words = words[: words.index(">")] if ">" in words else words
        if words[0] == "attent":
            stream = run_attent(words[1:], stream, location, monkeypatch)
        else:
            assert words[0] in ("cat", "echo", "printf", "python"), f"{location}: do not know how to try `{command}`"
            words = [sys.executable, *words[1:]] if words[0] == "python" else words
            stream = subprocess.run(words, input=stream, stdout=subprocess.PIPE, check=True).stdout
        if target is not None:
            Path(target).write_bytes(stream)


def run_attent(arguments: list[str], stdin: bytes, location: str, monkeypatch: pytest.MonkeyPatch) -> bytes:
    output, errors = io.TextIOWrapper(io.BytesIO(), encoding="utf-8"), io.StringIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(errors):
        code = main(arguments)
    output.flush()
    assert code == 0, f"{location}: attent {' '.join(arguments)}: exit code {code}\n{errors.getvalue()}"
    return output.buffer.getvalue()


# ---- links -----------------------------------------------------------------------------------------------------


def test_links_lead_to_files_and_headings() -> None:
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
    wrong = [
        f"{page.relative_to(ROOT)}: {target}{anchor}"
        for page in pages
        for target, anchor in LINK.findall(page.read_text(encoding="utf-8"))
        if not leads_somewhere(page.parent / target if target else page, anchor)
    ]
    assert not wrong, "\n".join(wrong)


def leads_somewhere(path: Path, anchor: str) -> bool:
    if path.suffix != ".md" or not anchor or not path.exists():
        return path.exists()
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    slugs = {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}
    return anchor.removeprefix("#") in slugs


# ---- the site --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Example:
    """A comment explains a field.

    size   from the docstring
    """

    size: int
    rate: float = 0.5  # per `step`
    plain: int = 0


def test_docstrings_become_restructured_text() -> None:
    text = """Return 2 * x; see `Mask` and `x_`.

        data        files or `names`
                    in two lines
        src, tgt    languages

            B  batch

        y = attent.load("M")

        >>> 1 + 1
        2"""
    lines = [line.removeprefix("        ") for line in text.splitlines()]
    assert convert_docstring(lines, None, {"Mask": "attent.nn.Mask"}) == [
        r"Return 2 \* x; see \ :py:obj:`Mask <attent.nn.Mask>`\  and \ ``x_``\ .",
        "",
        ".. code-block:: text",
        "",
        "        B  batch",
        "",
        ".. code-block:: python",
        "",
        '    y = attent.load("M")',
        "",
        ">>> 1 + 1",
        "2",
        "",
        r":param data: files or \ ``names``\  in two lines",
        ":param src: languages",
        ":param tgt: languages",
    ]


def test_fields_of_a_dataclass_are_explained_by_their_comments() -> None:
    lines = convert_docstring((inspect.getdoc(Example) or "").splitlines(), Example, {})
    assert [line for line in lines if line.startswith(":param")] == [
        ":param size: from the docstring",
        r":param rate: per \ ``step``\ ",
    ]


def test_every_flag_is_in_the_command_reference() -> None:
    pages = dict(iterate_reference())
    for name in COMMANDS:
        arguments = make_app()[name].assemble_argument_collection()
        flags = {flag for argument in arguments if argument.show for flag in argument.names if flag.startswith("-")}
        page = pages[f"reference/commands/{name}.md"]
        assert flags <= set(re.findall(r"`(-[^`]+)`", page)), name
    names = set(attent.__all__) - {"__version__", "nn"}
    assert {f"reference/attent/{name}.rst" for name in names} <= pages.keys()


@pytest.mark.slow
def test_site_builds_without_warnings_and_loads_nothing_from_elsewhere(tmp_path: Path) -> None:
    for package in ("sphinx", "furo", "myst_nb"):
        pytest.importorskip(package)
    source, site = tmp_path / "source", tmp_path / "site"
    source.mkdir()
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-c", "docs", source, site]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    pages = {str(path.relative_to(site)): path.read_text(encoding="utf-8") for path in site.rglob("*.html")}
    assert {"index.html", "search.html", "training.html", "reference/attent/Translator.html"} <= pages.keys()
    styles = {path.name: path.read_text(encoding="utf-8") for path in site.rglob("*.css")}
    loaded = {name: found for name, text in (pages | styles).items() if (found := EXTERNAL.findall(text))}
    assert not loaded
    assert '<a class="reference internal" href="#attent.Translator.load">' in pages["reference/attent/Translator.html"]
    assert "<strong>batch_tokens</strong>" in pages["reference/attent/Translator.html"]
