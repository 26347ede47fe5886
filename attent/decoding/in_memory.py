"""The plain way for a model in memory, such as one that is being trained: texts in, their best translations out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from attent.decoding.engines.gpu.eligibility import release_model
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import SearchOptions
from attent.decoding.translator import Translator
from attent.models import Seq2Seq
from attent.text.tokenizer import Tokenizer

__all__ = ["SearchCancelled", "translate_texts"]


def translate_texts(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    to: str | None = None,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    batch_tokens: int | None = None,
    should_stop: Callable[[], bool] | None = None,
) -> list[str]:
    """The best translation of each text, on the model's device; of a text that is nothing but space, nothing.

    to            the language to translate into, for a model trained with tags
    max_length    tokens of a target at most; None: those of its source + 50
    batch_tokens  source tokens, filled up and times `beam_size`, that are searched for at once: it bounds the memory
    stop          asked again and again; if it answers True, `Stopped` is raised
    """
    search = SearchOptions(beam_size=beam_size, length_penalty=length_penalty, max_length=max_length)
    translator = Translator(model, tokenizer, batch_tokens=batch_tokens)
    try:
        return [one.text for one in translator.translate(texts, search, to=to, should_stop=should_stop)]
    finally:
        release_model(model)  # whoever trains it has a better use for the memory
