"""The commands and code blocks of README.md run, and the Python blocks of docs/.

    ```python             run, each block by itself
    ```sh, ```console     `attent` commands run, all in one empty folder and from top to bottom, so that a
                          later one finds what an earlier one made; of a console block the lines with `$ `
    make, pip, git clone  not run: the target, the extra or the file that they name must exist

Two things differ from what a reader does: training stops after fewer steps, and the pages of docs/ find a model with
random weights as `runs/en-de`.

A block that cannot run here says so where a reader sees it, in its first line:
`# not run by the tests: REASON`. Blocks in other languages (text, toml, json, html) are not commands. A block
without a language is refused, since it is unclear whether it should run.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

import attent
from attent.models.weights import save_model

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SHELL, PYTHON, PROSE = ("sh", "console"), ("python",), ("text", "toml", "json", "html")
OPT_OUT = re.compile(r"# not run by the tests: \S+")
SHOWN_ONLY = ("cd", "git")  # about the reader's own folders
RUNNABLE = ("attent", "cat", "echo", "head", "printf", "python")
FEWER_STEPS = ("--steps 200 ", "--steps 10 ")
MINUTES = 10  # a command that takes longer than this is not one for a README


@dataclass(frozen=True)
class Block:
    line: int  # of the opening fence
    language: str
    text: str

    @property
    def opted_out(self) -> bool:
        return OPT_OUT.match(self.text) is not None


def test_readme_commands_run(tmp_path: Path) -> None:
    blocks = read_blocks(README.read_text(encoding="utf-8"))
    assert any(not block.opted_out for block in blocks), "README.md shows nothing that runs"
    assert any(FEWER_STEPS[0] in block.text for block in blocks)
    run_blocks([replace(block, text=block.text.replace(*FEWER_STEPS)) for block in blocks], tmp_path)


@pytest.mark.parametrize("page", sorted(path.name for path in (ROOT / "docs").glob("*.md")))
def test_python_blocks_of_the_documentation_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = read_blocks((ROOT / "docs" / page).read_text(encoding="utf-8"))
    runnable = [block for block in blocks if block.language in PYTHON and not block.opted_out]
    if any("runs/en-de" in block.text or "trace.json" in block.text for block in runnable):
        save_example_model(tmp_path / "runs" / "en-de")
        (tmp_path / "trace.json").write_text(attent.look("runs/en-de", "one").to_json(), encoding="utf-8")
    for block in runnable:
        code = compile("\n" * block.line + block.text, f"docs/{page}", "exec")
        exec(code, {"__name__": "__main__"})


def save_example_model(folder: Path) -> None:
    """Save a model of three layers with random weights and the tokenizer of the committed example."""
    example = ROOT / "tests" / "models" / "saved_model"
    config = attent.load(example).config
    encoder, decoder = (replace(stack, layers=3) for stack in (config.encoder, config.decoder))
    model = attent.build(replace(config, encoder=encoder, decoder=decoder))
    save_model(model, folder, {"tokenizer.model": (example / "tokenizer.model").read_bytes()})


# ---- reading -----------------------------------------------------------------------------------------------


def read_blocks(text: str) -> list[Block]:
    """Return the code blocks to run, in order."""
    blocks, opening, body = [], None, list[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        fence = re.match(r"\s*```(\S*)", line)
        if fence and opening is None:
            opening, body = Block(number, fence[1], ""), []
        elif fence and opening is not None:
            blocks.append(Block(opening.line, opening.language, "\n".join(body)))
            opening = None
        else:
            body.append(line)
    assert opening is None, f"line {opening.line}: this block is never closed"
    return [block for block in blocks if is_tried(block)]


def is_tried(block: Block) -> bool:
    known = SHELL + PYTHON + PROSE
    assert block.language in known, f"line {block.line}: ```{block.language} must be one of {', '.join(known)}"
    return block.language not in PROSE


def commands(block: Block) -> Iterator[str]:
    """Yield the commands of a shell block, with continued lines joined and comments removed."""
    lines = block.text.replace("\\\n", " ").splitlines()
    if block.language == "console":
        lines = [line[2:] for line in lines if line.startswith("$ ")]
    yield from (line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#"))


# ---- running -----------------------------------------------------------------------------------------------


def run_blocks(blocks: list[Block], folder: Path) -> None:
    environment = make_environment(folder / "bin")
    workplace = folder / "workplace"
    workplace.mkdir()
    for block in (block for block in blocks if not block.opted_out):
        if block.language in PYTHON:
            run(block, [sys.executable, "-c", block.text], workplace, environment)
            continue
        for command in commands(block):
            try_command(block, command, workplace, environment)


def try_command(block: Block, command: str, workplace: Path, environment: dict[str, str]) -> None:
    words = shlex.split(command, comments=True)
    if words[0] in SHOWN_ONLY:
        return
    if words[0] in ("make", "pip"):
        problem = check_make(words[1:]) if words[0] == "make" else check_pip(words[1:])
        assert problem is None, f"README.md line {block.line}: {command}: {problem}"
        return
    assert words[0] in RUNNABLE, f"README.md line {block.line}: do not know how to try `{command}`"
    run(block, ["bash", "-euo", "pipefail", "-c", command], workplace, environment)


def run(block: Block, command: list[str], workplace: Path, environment: dict[str, str]) -> None:
    """Run a command; both output streams go into one text, as in a terminal."""
    done = subprocess.run(
        command,
        cwd=workplace,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=60 * MINUTES,
        check=False,
    )
    location = f"README.md line {block.line}"
    assert done.returncode == 0, f"{location}: exit code {done.returncode}\n{command[-1]}\n{done.stdout}"


def make_environment(bin_folder: Path) -> dict[str, str]:
    """Return an environment in which `attent` and `python` are those that run this test."""
    bin_folder.mkdir()
    for name, arguments in (("attent", "-m attent "), ("python", "")):
        script = bin_folder / name
        script.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} {arguments}"$@"\n')
        script.chmod(0o755)
    path = f"{bin_folder}{os.pathsep}{os.environ.get('PATH', '')}"
    ours = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "NO_COLOR": "1", "ATTENT_CACHE": str(bin_folder / "cache")}
    return {**os.environ, "PATH": path, **ours}


def check_make(targets: list[str]) -> str | None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    known = set(re.findall(r"^([a-z-]+):", makefile, re.MULTILINE))
    wrong = [target for target in targets if "=" not in target and target not in known]
    return f"the Makefile has no target {', '.join(wrong)}" if wrong else None


def check_pip(words: list[str]) -> str | None:
    """Check that the extras and files named by a `pip install` of this package exist."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    if words[:1] != ["install"]:
        return "only `pip install` is known here"
    for word in words[1:]:
        extras = re.fullmatch(r"(?:attent|\.)\[([\w,-]+)\]", word)
        wrong = set(extras[1].split(",")) - set(project["optional-dependencies"]) if extras else set()
        if wrong:
            return f"pyproject.toml has no extra {', '.join(sorted(wrong))}"
        if word.endswith(".txt") and not (ROOT / word).exists():
            return f"there is no file {word}"
    return None


# ---- tests of the checks ----------------------------------------------------------------------------------


def make_block(language: str, text: str) -> str:
    return f"Some words.\n\n```{language}\n{text}\n```\n"


@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("python", "import attent\nattent.no_such_name", "no_such_name"),
        ("sh", "attent no-such-command", "unknown command"),
        ("console", "$ attent no-such-command\nall is well", "unknown command"),
        ("sh", "make no-such-target", "no target no-such-target"),
        ("sh", "pip install 'attent[nonsense]'", "no extra nonsense"),
        ("sh", "pip install -c nowhere.txt attent", "no file nowhere.txt"),
        ("sh", "rm -rf things", "do not know how to try"),
        ("sh", "# not run by the tests:\nattent no-such-command", "unknown command"),
        ("", "attent --version", "must be one of"),
        ("bash", "attent --version", "must be one of"),
    ],
)
def test_a_block_that_does_not_work_is_caught(language: str, text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run_blocks(read_blocks(make_block(language, text)), tmp_path)


@pytest.mark.parametrize(
    ("language", "text"),
    [
        ("sh", "# comments are for the reader\nattent \\\n  --version"),
        ("console", "$ attent --version\nattent 99.9"),
        ("sh", "git clone URL\ncd attent\nmake setup test WORKERS=4"),
        ("sh", "pip install -c constraints.txt 'attent[serve,hf]'\npip install -e '.[dev]'"),
        ("sh", "# not run by the tests: needs two GPUs\nattent no-such-command"),
        ("text", "attent no-such-command"),
    ],
)
def test_a_block_that_works_passes(language: str, text: str, tmp_path: Path) -> None:
    run_blocks(read_blocks(make_block(language, text)), tmp_path)


def test_later_commands_find_what_earlier_ones_made(tmp_path: Path) -> None:
    text = make_block("sh", "attent --version > made.txt") + make_block("python", "print(open('made.txt').read())")
    run_blocks(read_blocks(text), tmp_path)
