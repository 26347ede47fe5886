"""Incremental detokenization with stop strings: text is released as soon as later tokens cannot change it.

Text is never released with half a character. A stop string is not part of the text and may span tokens.
"""

from collections.abc import Sequence

from attent.text.vocabulary import ESCAPE, Vocabulary

CONTEXT_TOKENS = 8  # prompt tokens that the first new ones are decoded with: the first of a text loses its space
INCOMPLETE_ENDINGS = ("\ufffd", ESCAPE)  # half a character; in our vocabularies, half of an escaped one


def decode_continuation(vocabulary: Vocabulary, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return the text of `token_ids` after a prompt, with the space before its first word if there is one."""
    context = get_context(vocabulary, prompt)
    return decode_after_context(vocabulary, context, vocabulary.decode(context), token_ids)


def get_context(vocabulary: Vocabulary, prompt: Sequence[int]) -> list[int]:
    """Return the last tokens of a prompt, not starting inside a run of byte tokens, which are decoded together."""
    start = max(0, len(prompt) - CONTEXT_TOKENS)
    while start and prompt[start] in vocabulary.byte_ids:
        start -= 1
    return list(prompt[start:])


def decode_after_context(
    vocabulary: Vocabulary, context: Sequence[int], context_text: str, token_ids: Sequence[int]
) -> str:
    text = vocabulary.decode([*context, *token_ids])
    # Invalid bytes can change the text before them, which has been released already.
    return text[len(context_text) :] if text.startswith(context_text) else vocabulary.decode(token_ids)


class IncrementalDetokenizer:
    """Turns the tokens after a prompt into text; the pieces from `add_token` and `flush` make up the whole."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int], stop: Sequence[str] = ()) -> None:
        self.vocabulary, self.stop_words = vocabulary, tuple(stop)
        self.context = get_context(vocabulary, prompt)  # released tokens, needed to decode the next
        self.context_text = vocabulary.decode(self.context)
        self.pending_tokens: list[int] = []  # not decoded yet
        self.held_text = ""  # may be the start of a stop string
        self.text = ""  # released so far
        self.token_count = 0  # added before it stopped
        self.is_stopped = False

    def add_token(self, token: int) -> str:
        if self.is_stopped:
            return ""
        self.token_count += 1
        self.pending_tokens.append(token)
        # The next token may belong to the same run of byte tokens; tokens without text do not end a run.
        byte_ids, decode = self.vocabulary.byte_ids, self.vocabulary.decode
        with_text = (token for token in reversed(self.pending_tokens) if token in byte_ids or decode([token]))
        if byte_ids and next(with_text, None) in byte_ids:
            return ""
        text = self._decode_pending()
        if not text or text.endswith(INCOMPLETE_ENDINGS):
            return ""
        self._commit_pending()
        return self._release_text(text, last=False)

    def flush(self) -> str:
        if self.is_stopped:
            return ""
        text = self._decode_pending()
        self._commit_pending()
        return self._release_text(text, last=True)

    def _decode_pending(self) -> str:
        return decode_after_context(self.vocabulary, self.context, self.context_text, self.pending_tokens)

    def _commit_pending(self) -> None:
        self.context, self.pending_tokens = self.pending_tokens or self.context, []
        self.context_text = self.vocabulary.decode(self.context)

    def _release_text(self, text: str, *, last: bool) -> str:
        self.held_text += text
        # The match that ends first, so that the result does not depend on the tokenization.
        starts = [(self.held_text.find(word), word) for word in self.stop_words if word in self.held_text]
        if starts:
            self.is_stopped, end = True, min((start + len(word), start) for start, word in starts)[1]
        else:
            end = len(self.held_text) - (0 if last else count_partial_match(self.held_text, self.stop_words))
        released, self.held_text = self.held_text[:end], self.held_text[end:]
        self.text += released
        return released


def count_partial_match(text: str, words: Sequence[str]) -> int:
    """Return how many characters at the end of a text may start one of the words."""
    longest = min(len(text), max(map(len, words), default=1) - 1)
    sizes = range(longest, 0, -1)
    return next((n for n in sizes if any(word.startswith(text[-n:]) and len(word) > n for word in words)), 0)
