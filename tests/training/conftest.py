"""Limits that keep the runs of these tests short."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.training.runs import MAX_EXTRA_TOKENS


@pytest.fixture(scope="module", autouse=True)
def short_translations() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("attent.decoding.options.MAX_EXTRA_TOKENS", MAX_EXTRA_TOKENS)
        yield
