"""Every fault in `faults` still matches the code. (`make faults` plants them, which takes some minutes.)"""

from __future__ import annotations

import pytest

from tests.faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("text", FAULTS.strip().split("\n\n"), ids=lambda text: text.splitlines()[0].removeprefix("# "))
def test_fault_matches_code(text: str) -> None:
    fault = Fault.read(text)
    code = (ROOT / "attent" / fault.file).read_text(encoding="utf-8")
    assert fault.mutate(code) != code
