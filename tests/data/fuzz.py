"""Deterministic fuzz inputs: mutated valid files, shuffled tokens of a format, and well-formed but meaningless XML.

A reader must end quickly, in pairs and bad lines or in a CorpusError, and yield text that UTF-8 can encode.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

from attent.data.pairs import BadLine, CorpusError, Pair

INPUT_COUNT = int(os.environ.get("FUZZ_INPUTS", "10000"))  # set both for a longer run on other inputs
SEED = int(os.environ.get("FUZZ_SEED", "0"))
MAX_SECONDS = 2.0  # of CPU time, which other processes do not change
NASTY_TOKENS = [
    *(bytes([code]) for code in (0, 9, 10, 13, 26, 34, 38, 39, 60, 62, 92, 127, 128, 133, 192, 237, 254, 255)),
    b"\xef\xbb\xbf",
    b"\xff\xfe",
    b"\xed\xa0\x80",
    b"\xf4\x90\x80\x80",
    b"\xe2\x80\xa8",
    b"\r\n",
    b"9" * 30,
    b"-1",
    b"\x1f\x8b\x08",
]


def generate_inputs(valid_files: Sequence[bytes], format_tokens: Sequence[bytes], seed: int) -> Iterator[bytes]:
    """Yield mutated valid files (four in five) and random sequences of tokens."""
    rng = random.Random(seed + SEED)
    tokens = [*format_tokens, *NASTY_TOKENS]
    for number in range(INPUT_COUNT):
        if number % 5 == 4:
            yield b"".join(rng.choices(tokens, k=rng.randint(1, 40)))
        else:
            content = rng.choice(valid_files)
            for _ in range(rng.choice((1, 1, 2, 3, 8))):
                content = mutate(content, tokens, rng)
            yield content[:4000]


def generate_trees(root: str, tags: Sequence[str], texts: Sequence[str], seed: int) -> Iterator[bytes]:
    """Yield well-formed XML with randomly nested tags, written as they open (`tuv lang="de"`), and texts."""
    rng = random.Random(seed + SEED)

    def content(depth: int) -> str:
        parts = [rng.choice(texts)]
        for _ in range(rng.randint(0, 4 - depth // 2)):
            tag = rng.choice(tags)
            parts += [f"<{tag}>", content(depth + 1), f"</{tag.split()[0]}>", rng.choice(texts)]
        return "".join(parts)

    for _ in range(INPUT_COUNT // 4):
        yield f"<{root}>{content(1)}</{root}>".encode()


def mutate(content: bytes, tokens: Sequence[bytes], rng: random.Random) -> bytes:
    """Apply one random change: flip a bit, delete, insert a token, truncate, swap, repeat or overwrite."""
    left, right = sorted(rng.randint(0, len(content)) for _ in range(2))
    kind = rng.randrange(7)
    if kind == 0 and left < len(content):
        return content[:left] + bytes([content[left] ^ (1 << rng.randrange(8))]) + content[left + 1 :]
    if kind == 1:
        return content[:left] + content[min(right, left + rng.randint(1, 30)) :]
    if kind == 2:
        return content[:left] + rng.choice(tokens) + content[left:]
    if kind == 3:
        return content[:left]
    if kind == 4:
        return content[right:] + content[left:right] + content[:left]
    if kind == 5:
        return content[:left] + content[left : left + 40] * rng.randint(2, 6) + content[left + 40 :]
    return content[:left] + rng.randbytes(rng.randint(1, 8)) + content[right:]


def assert_survives(
    read: Callable[[bytes], Iterable[Pair | BadLine]], contents: Iterable[bytes]
) -> tuple[int, int, int]:
    """Return the numbers of pairs, bad lines and refused files; the caller checks that all three occur."""
    pairs = bad_lines = refused = 0
    for content in contents:
        start = time.process_time()
        try:
            for item in read(content):
                assert item.line >= 1
                assert isinstance(item.file, str)
                if isinstance(item, Pair):
                    (item.source + item.target).encode()
                    pairs += 1
                else:
                    assert item.reason
                    assert len(item.excerpt) <= 80
                    bad_lines += 1
        except CorpusError as error:
            if "\n" in str(error) or ": " not in str(error):
                raise AssertionError(f"not an error message with advice: {error}") from error
            refused += 1
        except Exception as error:
            raise AssertionError(f"{error!r} from {content!r}") from error
        assert time.process_time() - start < MAX_SECONDS, content
    return pairs, bad_lines, refused
