"""The commands and code blocks of README.md run.

    ```python             run, each block by itself
    ```sh, ```console     `attent` commands run, all in one empty folder and from top to bottom, so that a
                          later one finds what an earlier one made; of a console block the lines with `$ `
    make, pip, git clone  not run: the target, the extra or the file that they name must exist

One thing differs from what a reader does: training stops after fewer steps. `code_blocks.py` says how a block is
marked that is not run. A block without a language is refused, since it is unclear whether it should run.
"""

import os
import re
import shlex
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path

import pytest

from tests.code_blocks import PYTHON, Block, check_block, read_blocks, read_commands

ROOT = Path(__file__).resolve().parent.parent
README = ROOT / "README.md"
SHOWN_ONLY = ("cd", "git")  # about the reader's own folders
RUNNABLE = ("attent", "cat", "echo", "head", "printf", "python")
STEPS = re.compile(r"(?<=\bsteps[ =])200\b")  # 10 are enough
MINUTES = 10  # a command that takes longer than this is not one for a README


def test_readme_commands_run(tmp_path: Path) -> None:
    blocks = read_blocks(README.read_text(encoding="utf-8"))
    assert any(block.is_run for block in blocks), "README.md shows nothing that runs"
    assert sum(bool(STEPS.search(block.text)) for block in blocks) == 2
    run_blocks([replace(block, text=STEPS.sub("10", block.text)) for block in blocks], tmp_path)


# ---- running -----------------------------------------------------------------------------------------------


def run_blocks(blocks: list[Block], folder: Path) -> None:
    environment = make_environment(folder / "bin")
    workplace = folder / "workplace"
    workplace.mkdir()
    for block in blocks:
        if not block.is_run:
            check_block(block)
            continue
        if block.language in PYTHON:
            run(block, [sys.executable, "-c", block.text], workplace, environment)
            continue
        for command in read_commands(block):
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


NOTE = "<!-- not run by the tests: needs two GPUs -->"


def make_block(language: str, text: str, note: str = "") -> str:
    return f"Some words.\n\n{note}\n```{language}\n{text}\n```\n"


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
        ("sh", "# not run by the tests: needs two GPUs\nattent --version", "put the note before the block"),
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
        ("text", "attent no-such-command"),
    ],
)
def test_a_block_that_works_passes(language: str, text: str, tmp_path: Path) -> None:
    run_blocks(read_blocks(make_block(language, text)), tmp_path)


def test_later_commands_find_what_earlier_ones_made(tmp_path: Path) -> None:
    text = make_block("sh", "attent --version > made.txt") + make_block("python", "print(open('made.txt').read())")
    run_blocks(read_blocks(text), tmp_path)


@pytest.mark.parametrize(
    ("language", "text", "complaint"),
    [
        ("sh", "attent no-such-command", "unknown command"),
        ("sh", "X=1 torchrun -m attent train --data corpus.tsv ... --no-such-flag 1", "no-such-flag"),
        ("sh", "echo one | attent translate M --beam-size many > out.txt", "many"),
        ("python", "import attent\nattent.no_such_name", "no_such_name"),
        ("python", "import attent\nx = attent.Generator.load('gpt2')\nx.no_such_method()", "no_such_method"),
    ],
)
def test_a_block_that_is_not_run_is_checked(language: str, text: str, complaint: str, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=complaint):
        run_blocks(read_blocks(make_block(language, text, NOTE)), tmp_path)


def test_a_block_that_is_not_run_passes(tmp_path: Path) -> None:
    text = "curl localhost:8017\nattent serve runs/en-de"
    run_blocks(read_blocks(make_block("sh", text, NOTE)), tmp_path)
