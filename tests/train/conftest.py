"""What keeps the small runs of these tests small."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.train.runs import FEW_MORE


@pytest.fixture(scope="module", autouse=True)
def short_translations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attent.decode.options.MORE", FEW_MORE)
        yield
