"""Constraints of a translation."""

from __future__ import annotations

from attent.decoding.options import PhraseConstraints


def test_constraints_are_extended() -> None:
    base = PhraseConstraints(prefix="Ein h", prefix_is_partial=True, banned=("Katze",))
    assert base.extend() is base
    assert base.extend(required=("Hund",), banned=["Maus"]) == PhraseConstraints(
        prefix="Ein h", prefix_is_partial=True, required=("Hund",), banned=("Katze", "Maus")
    )
    assert base.extend(prefix="Der") == PhraseConstraints(prefix="Der", banned=("Katze",))
    assert base.extend(prefix="") == PhraseConstraints(banned=("Katze",))
