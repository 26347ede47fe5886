"""Training reads and writes no pickle, from the corpus to the model card, also when resumed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.training.runs import ROOT, command, write_corpus

PROGRAM = """
import sys
import torch
from attent import cli
from attent.decoding import options

options.MAX_EXTRA_TOKENS = 6  # a model that has learned nothing writes as many tokens as it may
seen = []
# Babel's locale data is a pickle inside the installed package.
sys.addaudithook(
    lambda name, args: seen.append(name) if name == "pickle.find_class" and not args[0].startswith("babel.") else None
)
for name in ("load", "save"):
    def refuse(*_, name=name, **__):
        seen.append(f"torch.{name}")
        raise SystemExit(f"torch.{name} was called")
    setattr(torch, name, refuse)
cut = sys.argv.index("--")
for more in ([], sys.argv[cut + 1:]):
    code = cli.main([*sys.argv[1:cut], *more])
    assert code == 0, code
print("before the control:", sorted(set(seen)))
import pickle
pickle.loads(pickle.dumps(cli.main))
print("after the control:", sorted(set(seen)))
"""


@pytest.mark.slow
def test_training_and_resuming_unpickle_nothing(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "corpus.tsv", 60)
    words = command(data, tmp_path / "run", "--set", "train.steps=4")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *words, "--", "--set", "train.steps=8"],
        capture_output=True, text=True, cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "ATTENT_CACHE": str(tmp_path / "cache")},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert f"resuming {tmp_path / 'run'} from step 4" in done.stderr
    assert done.stdout.splitlines() == ["before the control: []", "after the control: ['pickle.find_class']"]


def test_no_written_file_is_a_pickle(tmp_path: Path) -> None:
    """Checked by the first bytes: a pickle begins with its protocol, archives of torch.save with PK."""
    from attent import cli

    assert cli.main(command(write_corpus(tmp_path / "corpus.tsv", 60), tmp_path / "run", "--set", "train.steps=4")) == 0
    files = [path for path in (tmp_path / "run").rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        begin = path.read_bytes()[:2]
        assert begin != b"PK", path
        assert begin[:1] != b"\x80" or path.suffix == ".npy", path
