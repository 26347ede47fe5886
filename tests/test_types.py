"""Users of mypy and pyright get the types of the public functions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

import attent

SCRIPT = """
import attent
reveal_type(attent.train)
reveal_type(attent.score)
translator = attent.Translator.load("runs/en-de")
reveal_type(translator.translate(["A man rides a bike."])[0].text)
inspection = attent.look(translator, "A man rides a bike.")
reveal_type(inspection)
reveal_type(inspection.attention["decoder.blocks.2.cross_attn"].queries)
model = attent.build(attent.presets.base(vocab=8000))
reveal_type(model)
reveal_type(model.summary())
with attent.record(model) as trace, attent.mask_heads(model, "decoder.blocks.2.cross_attn:1"):
    reveal_type(trace["decoder.blocks.2.cross_attn"])
reveal_type(attent.measure_heads(translator, [("one", "eins")]))
reveal_type(attent.nn.Attention(width=64, heads=4))
"""
TYPES = [
    r"^def \(.*\) -> attent\.training\.",
    r"^(Overload\()?def .*\) -> attent\.scoring\.",
    "^str$",
    r"^attent\.inspection\.session\.Inspection$",
    r"^tuple\[str, \.\.\.\]$",
    r"^attent\.models\.seq2seq\.Seq2Seq$",
    r"^attent\.models\.weights\.ModelSummary$",
    r"^list\[torch\._tensor\.Tensor\]$",
    r"^attent\.inspection\.head_stats\.HeadStatsReport$",
    r"^attent\.nn\.attention\.Attention$",
]


@pytest.mark.slow
def test_types_of_the_public_functions(tmp_path: Path) -> None:
    pytest.importorskip("mypy")
    assert (Path(attent.__file__).parent / "py.typed").is_file()
    (tmp_path / "user.py").write_text(SCRIPT, encoding="utf-8")
    command = [sys.executable, "-m", "mypy", str(tmp_path / "user.py")]
    root = Path(__file__).resolve().parent.parent
    report = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout
    assert "error:" not in report, report
    types = re.findall(r'Revealed type is "(.*)"', report)
    assert len(types) == len(TYPES)
    for revealed, expected in zip(types, TYPES, strict=True):
        assert re.search(expected, revealed), (expected, revealed)
