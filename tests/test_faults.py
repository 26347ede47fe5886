"""The list of faults stays true as the code moves on. (`make faults` plants them, which takes some minutes.)"""

from __future__ import annotations

import pytest

from tests.faults import FAULTS, ROOT, Fault


@pytest.mark.parametrize("text", FAULTS.strip().split("\n\n"), ids=lambda text: text.splitlines()[0].removeprefix("# "))
def test_the_text_of_a_fault_stands_once_in_the_code(text: str) -> None:
    fault = Fault.read(text)
    assert (ROOT / "attent" / fault.file).read_text(encoding="utf-8").count(fault.old) == 1
