"""Incremental detokenization: released text never changes, and stop strings may span tokens."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from attent.decoding.generation.generator import IncrementalDetokenizer, decode_continuation
from attent.text.vocabulary import ESCAPE, Vocabulary
from tests.decoding.toy_generators import byte_level, fallback, sentencepiece_tokenizer

WORDS = {"bytes": byte_level, "sentencepiece": sentencepiece_tokenizer}
EVERY = {**WORDS, "fallback": fallback}
ODD = "Ein Hund läuft: 😀 ▁ 汉字\u200d, \ufffd" + ESCAPE + "1 und  mehr"


def release_pieces(
    vocabulary: Vocabulary, ids: list[int], prompt: list[int], stop: tuple[str, ...] = ()
) -> tuple[IncrementalDetokenizer, list[str]]:
    detokenizer = IncrementalDetokenizer(vocabulary, prompt, stop)
    released = [detokenizer.add_token(token) for token in ids]
    return detokenizer, [*released, detokenizer.flush()]


@pytest.mark.parametrize("make", WORDS.values(), ids=WORDS)
def test_characters_are_released_whole(make: type) -> None:
    vocabulary: Vocabulary = make().target
    whole = vocabulary.encode([f"A man {ODD}"])[0]
    prompt = vocabulary.encode(["A man"])[0]
    assert whole[: len(prompt)] == prompt
    detokenizer, released = release_pieces(vocabulary, whole[len(prompt) :], prompt)
    assert "".join(released) == detokenizer.text == f" {ODD}"
    assert sum("\ufffd" in piece for piece in released) == 1  # the one in the text itself
    assert len([piece for piece in released if piece]) > 10


@pytest.mark.parametrize("make", EVERY.values(), ids=EVERY)
@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(0, 270) | st.integers(0xC0 + 3, 0xFF + 3), min_size=1, max_size=30), st.integers(0, 16))
def test_pieces_join_to_the_decoded_text(make: type, ids: list[int], cut: int) -> None:
    vocabulary: Vocabulary = make().target
    _, released = release_pieces(vocabulary, ids[cut:], ids[:cut])
    assert "".join(released) == decode_continuation(vocabulary, ids[:cut], ids[cut:])


def test_a_run_of_byte_tokens_in_the_prompt_is_decoded_whole() -> None:
    vocabulary = fallback().target
    prompt, whole = vocabulary.encode(["haየየየየ", "haየየየየሰላm"])
    assert len(prompt) == 3 + 4 * 3
    assert whole[: len(prompt)] == prompt
    assert decode_continuation(vocabulary, prompt, whole[len(prompt) :]) == "ሰላm"
    assert release_pieces(vocabulary, whole[len(prompt) :], prompt)[1] == [*[""] * 6, "ሰላm", ""]


def test_byte_tokens_are_held_until_their_run_ends() -> None:
    vocabulary = fallback().target
    whole, half = "é".encode(), b"\xe1"
    ids = [3 + byte for byte in whole + half] + vocabulary.encode(["a"])[0]
    start, spoilt = vocabulary.encode(["ha"])[0], "\ufffd" * 3 + " a"
    assert "".join(release_pieces(vocabulary, ids, start)[1]) == decode_continuation(vocabulary, start, ids) == spoilt
    parted = [ids[0], vocabulary.start, *ids[1:]]  # tokens without text do not split the run
    assert (
        "".join(release_pieces(vocabulary, parted, start)[1])
        == decode_continuation(vocabulary, start, parted)
        == spoilt
    )
    # Released text of the prompt never changes.
    prompt = [*start, *ids[:2]]
    assert (
        decode_continuation(vocabulary, prompt, ids[2:])
        == "".join(release_pieces(vocabulary, ids[2:], prompt)[1])
        == "\ufffd a"
    )


def test_a_possible_start_of_a_stop_string_is_held() -> None:
    vocabulary = byte_level().target
    ids = [token for letter in "say stones, stop here" for token in vocabulary.encode([letter])[0]]
    detokenizer, released = release_pieces(vocabulary, ids, [], ("stop", "zebra"))
    assert detokenizer.text == "say stones, "
    assert detokenizer.is_stopped
    assert detokenizer.token_count == len("say stones, stop")
    assert "".join(released[: len("say sto")]) == "say "
    assert "".join(released[: len("say ston")]) == "say ston"


@pytest.mark.parametrize("stop", [("abcd", "bc"), ("bc", "abcd"), ("d", "cd"), ("zz", "de")])
def test_stop_strings_do_not_depend_on_the_tokenization(stop: tuple[str, ...]) -> None:
    class Letters:
        """Tokens that are texts."""

        byte_ids: frozenset[int] = frozenset()

        def __init__(self, cuts: tuple[int, ...]) -> None:
            self.parts = ["abcdefgh"[a:b] for a, b in pairwise(cuts)]

        def decode(self, ids: list[int]) -> str:
            return "".join(self.parts[i] for i in ids)

    texts = set()
    for cuts in ((0, 8), (0, 1, 2, 3, 4, 5, 6, 7, 8), (0, 2, 8), (0, 3, 4, 8), (0, 1, 5, 8)):
        words = Letters(cuts)
        texts.add(release_pieces(words, list(range(len(words.parts))), [], stop)[0].text)  # type: ignore[arg-type]
    assert len(texts) == 1
