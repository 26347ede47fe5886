"""Text in, text out: sentences are encoded, laid into batches by length, searched for, and given back in their order.

The search itself is `search`'s, words are the tokenizer's. Long documents are not cut into sentences here: each text
is one source.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from attent.decode.search import beam
from attent.models import Seq2Seq

if TYPE_CHECKING:  # a search by itself, as in the laws, needs torch only
    from attent.text.tokenizer import Tokenizer

# How long a target may become: real ones seldom have twice the tokens of their source, and 20 more let short ones grow
# ("OK" to "Einverstanden"); a text beyond the lengths of training mostly repeats itself, and need not do so twice.
TIMES, MORE, MOST_MORE = 2, 20, 500


class Stopped(Exception):
    """The caller's `stop` said so; nothing was translated further."""


def translate(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    texts: Sequence[str],
    *,
    to: str | None = None,
    beam_size: int = 4,
    length_penalty: float = 0.6,
    max_length: int | None = None,
    batch_tokens: int = 4096,
    stop: Callable[[], bool] | None = None,
) -> list[str]:
    """The best translation of each text, on the model's device; of a text that is nothing but space, nothing.

    to            the language to translate into, for a model trained with tags
    max_length    tokens of a target at most; None: in proportion to the source
    batch_tokens  source tokens, filled up and times `beam_size`, that are searched for at once: it bounds the memory.
                  A source of more, or of more than the model has positions for, is cut; its end stays.
    stop          asked before each batch; if it answers True, `Stopped` is raised
    """
    _check(model, tokenizer, beam_size, max_length, batch_tokens)
    found = dict.fromkeys(text.strip() for text in texts)  # each once
    rows = tokenizer.encode_source(list(found), to)
    limit = min(batch_tokens, model.encoder.positions.max_length or batch_tokens)
    sources = {text: _cut(row, limit) for text, row in zip(found, rows, strict=True) if len(row) > _frame(to)}
    translations = dict.fromkeys(found, "")
    with _evaluating(model):
        for batch in _batches(sources, batch_tokens // beam_size):
            if stop is not None and stop():
                raise Stopped
            longest = max_length or _longest_target(len(sources[batch[0]]), model)
            ids = _searched(model, tokenizer, [sources[text] for text in batch], longest, beam_size, length_penalty)
            translations.update(zip(batch, map(tokenizer.target.decode, ids), strict=True))
    return [translations[text.strip()] for text in texts]


def _check(model: Seq2Seq, tokenizer: Tokenizer, beam_size: int, max_length: int | None, batch_tokens: int) -> None:
    if beam_size < 1:
        raise ValueError(f"`beam_size` must be 1 or more, but is {beam_size}")
    if batch_tokens < 2:
        raise ValueError(f"`batch_tokens` must be 2 or more, but is {batch_tokens}")
    if max_length is not None and max_length < 1:
        raise ValueError(f"`max_length` must be 1 or more tokens, but is {max_length}")
    for side, size, vocab in (
        ("source", tokenizer.source.size, model.config.vocab),
        ("target", tokenizer.target.size, model.config.targets),
    ):
        if size > vocab:
            raise ValueError(
                f"the tokenizer must be the model's, of {vocab} pieces at most on the {side} side, but has {size}; "
                f"load both from the same folder"
            )


def _frame(to: str | None) -> int:
    """Tokens of a source that are no text: the end and, where there is one, the tag of the language."""
    return 1 if to is None else 2


def _cut(row: list[int], limit: int) -> list[int]:
    return row if len(row) <= limit else [*row[: limit - 1], row[-1]]


def _longest_target(source: int, model: Seq2Seq) -> int:
    longest = min(TIMES * source + MORE, source + MOST_MORE)
    return min(longest, model.decoder.positions.max_length or longest)


def _batches(sources: dict[str, list[int]], tokens: int) -> Iterator[list[str]]:
    """Texts of like length together, the longest first: if memory is short, that is known at once."""
    batch: list[str] = []
    for text in sorted(sources, key=lambda text: -len(sources[text])):
        if batch and (len(batch) + 1) * len(sources[batch[0]]) > tokens:
            yield batch
            batch = []
        batch.append(text)
    if batch:
        yield batch


def _searched(
    model: Seq2Seq, tokenizer: Tokenizer, rows: list[list[int]], longest: int, beam_size: int, length_penalty: float
) -> list[list[int]]:
    """The best target of each source, without its end."""
    source, lengths = _padded(rows, tokenizer.source.pad, next(model.parameters()).device)
    end = model.config.end
    found = beam(
        model,
        source,
        lengths,
        start=model.config.start,
        end=end,
        max_length=longest,
        beam_size=beam_size,
        length_penalty=length_penalty,
        n_best=1,
        never=[tokenizer.target.pad],
    )
    best = found.tokens[:, 0].tolist()
    return [row[: row.index(end)] if end in row else row for row in best]


def _padded(rows: list[list[int]], pad: int, device: torch.device) -> tuple[Tensor, Tensor]:
    longest = max(map(len, rows))
    source = torch.tensor([row + [pad] * (longest - len(row)) for row in rows], device=device)
    return source, torch.tensor([len(row) for row in rows], device=device)


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Without dropout; afterwards every part is as it was, also one that is never trained."""
    before = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, training in before:
            module.training = training
