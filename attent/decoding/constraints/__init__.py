"""Search constraints: which tokens a hypothesis may not generate next.

To add one: write a module with a class that implements `Constraint` and `build` (None where nothing requests it), and
add it to CONSTRAINTS. Its option is a field of `SearchOptions` or `SearchRequest`.
"""

from collections.abc import Sequence

from attent.decoding.constraints.banned_phrases import BannedPhrases
from attent.decoding.constraints.base import (
    NEG_INF,
    Constraint,
    ConstraintSetup,
    GeneratedTokens,
    TargetVocabulary,
    apply_constraints,
)
from attent.decoding.constraints.prefix import BannedFirstTokens, ForcedPrefix
from attent.decoding.constraints.required_phrases import RequiredPhrases
from attent.decoding.constraints.token_rules import MinLength, NoLoops, NoRepeatNgram, has_loop
from attent.decoding.options import SearchOptions, SearchRequest

CONSTRAINTS = (MinLength, NoRepeatNgram, NoLoops, BannedPhrases, BannedFirstTokens, ForcedPrefix)

__all__ = [
    "NEG_INF", "Constraint", "GeneratedTokens", "TargetVocabulary", "apply_constraints", "build_constraints",
    "has_loop",
]  # fmt: skip


def build_constraints(
    options: SearchOptions, requests: Sequence[SearchRequest], vocabulary: TargetVocabulary
) -> tuple[tuple[Constraint, ...], RequiredPhrases | None]:
    setup = ConstraintSetup(options, requests, vocabulary)
    return tuple(filter(None, (kind.build(setup) for kind in CONSTRAINTS))), RequiredPhrases.build(setup)
