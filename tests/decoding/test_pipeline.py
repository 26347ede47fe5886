"""Constraints of a translation."""

from __future__ import annotations

from attent.decoding.options import PhraseConstraints


def test_constraints_are_extended() -> None:
    base = PhraseConstraints(prefix="Ein h", prefix_is_partial=True, ban=("Katze",))
    assert base.extend() is base
    assert base.extend(require=("Hund",), ban=["Maus"]) == PhraseConstraints(
        prefix="Ein h", prefix_is_partial=True, require=("Hund",), ban=("Katze", "Maus")
    )
    assert base.extend(prefix="Der") == PhraseConstraints(prefix="Der", ban=("Katze",))
    assert base.extend(prefix="") == PhraseConstraints(ban=("Katze",))
