"""Names of the splits of a corpus in file and folder names."""

from __future__ import annotations

import re

SPLIT_WORDS = {
    "train": ("train", "training"),
    "valid": ("valid", "val", "validation", "dev"),
    "test": ("test", "testing"),
}


def detect_split(name: str) -> str | None:
    """Return the split that a name begins with: `train500k`, `test_2016_flickr`, but not `testimony`."""
    for split, words in SPLIT_WORDS.items():
        if re.match(rf"({'|'.join(words)})(?![a-z])", name.lower()):
            return split
    return None
