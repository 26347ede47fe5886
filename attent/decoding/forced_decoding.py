"""Forced decoding: the log-probability that a model gives to each token of given translations, in one pass."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from attent.decoding.loading import batch_by_length, pad_token_ids
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens, shift_right
from attent.nn.devices import get_device
from attent.nn.eval_mode import eval_mode
from attent.storage.errors import AttentError
from attent.text.tokenizer import Tokenizer

BATCH_TOKENS = 4096  # of one side of a batch, with padding
MAX_LOGITS = 2**24  # computed at once: 64 MiB, whatever the vocabulary
MAX_EXPONENT = 700.0  # exp of more overflows

TokenIds = Sequence[int]


@dataclass(frozen=True, kw_only=True)
class TargetScores:
    tokens: tuple[str, ...]  # its pieces, with the end
    log_probs: tuple[float, ...]  # of each, given the source and those before it
    truncated: bool = False  # the source or the target was too long: only its beginning and the end were scored

    @property
    def log_prob(self) -> float:
        return math.fsum(self.log_probs)

    @property
    def length(self) -> int:
        return len(self.log_probs)

    @property
    def perplexity(self) -> float:
        return compute_perplexity(self.log_prob, self.length)


def compute_perplexity(log_prob: float, length: int) -> float:
    cross_entropy = -log_prob / max(1, length)
    return math.exp(cross_entropy) if cross_entropy < MAX_EXPONENT else math.inf


def score_targets(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    *,
    to: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[TargetScores]:
    """Score each target as the translation of its source; an empty one by the probability of ending at once.

    to            target language, for a model trained with language tags
    batch_tokens  bounds the memory; longer texts, and those beyond the model's positions, are truncated
    """
    check_pairs(sources, targets)
    pairs = encode_pairs(model, tokenizer, sources, targets, to, batch_tokens)
    suppressed_tokens = find_suppressed_tokens(model.config, tokenizer)
    target_ids = [pair.target for pair in pairs]
    log_probs = score_token_ids(model, [pair.source for pair in pairs], target_ids, batch_tokens, suppressed_tokens)
    num_given = len(tokenizer.target_prefix)  # these have no share in the scores
    return [
        TargetScores(
            tokens=tuple(tokenizer.target.to_pieces(pair.target[num_given:])),
            log_probs=tuple(row[num_given:]),
            truncated=pair.truncated,
        )
        for pair, row in zip(pairs, log_probs, strict=True)
    ]


def score_token_ids(
    model: Seq2Seq,
    sources: Sequence[TokenIds],
    targets: Sequence[TokenIds],
    batch_tokens: int = BATCH_TOKENS,
    suppressed_tokens: Sequence[int] = (),
) -> list[list[float]]:
    """Return each target token's log-probability, in which suppressed tokens share only if the target contains them."""
    log_probs: list[list[float]] = [[] for _ in sources]
    with eval_mode(model), torch.no_grad():
        for indices in batch_pairs(sources, targets, batch_tokens):
            batch = TeacherForcingBatch.from_ids(model, [sources[i] for i in indices], [targets[i] for i in indices])
            for index, row in zip(indices, batch.score_tokens(model, suppressed_tokens), strict=True):
                log_probs[index] = row
    return log_probs


@dataclass(frozen=True, kw_only=True)
class EncodedPair:
    """One pair as ids, each side with its end token."""

    source: list[int]
    target: list[int]
    truncated: bool


def check_pairs(sources: Sequence[str], targets: Sequence[str]) -> None:
    if len(sources) != len(targets):
        raise AttentError(
            f"there must be one target for each source, but there are {len(sources):,} sources and "
            f"{len(targets):,} targets; give both in the same order"
        )


def encode_pairs(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    sources: Sequence[str],
    targets: Sequence[str],
    to: str | None = None,
    batch_tokens: int = BATCH_TOKENS,
) -> list[EncodedPair]:
    if batch_tokens < 2:
        raise AttentError(f"`batch_tokens` must be 2 or more, but is {batch_tokens}")
    positions = (model.encoder.positions, model.decoder.positions)
    limits = [min(batch_tokens, scheme.max_length or batch_tokens) for scheme in positions]
    sides = (
        tokenizer.encode_source([text.strip() for text in sources], to),
        tokenizer.encode_target([text.strip() for text in targets]),
    )
    return [
        EncodedPair(
            source=truncate_ids(source, limits[0]),
            target=[*truncate_ids(target, limits[1])[:-1], model.config.end_id],
            truncated=len(source) > limits[0] or len(target) > limits[1],
        )
        for source, target in zip(*sides, strict=True)
    ]


def truncate_ids(ids: list[int], max_length: int) -> list[int]:
    """Keep the end token."""
    return ids if len(ids) <= max_length else [*ids[: max_length - 1], ids[-1]]


def batch_pairs(sources: Sequence[TokenIds], targets: Sequence[TokenIds], batch_tokens: int) -> Iterator[list[int]]:
    """Yield indices of pairs of similar length; empty targets are left out."""
    lengths = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    return batch_by_length(lengths, batch_tokens, (i for i, target in enumerate(targets) if target))


@dataclass(frozen=True, kw_only=True)
class TeacherForcingBatch:
    source: Tensor  # (B, Ts)
    source_lengths: Tensor
    target: Tensor  # (B, Tt) labels
    target_lengths: Tensor
    decoder_input: Tensor  # (B, Tt) the labels, shifted right

    @classmethod
    def from_ids(cls, model: Seq2Seq, sources: Sequence[TokenIds], targets: Sequence[TokenIds]) -> Self:
        device = get_device(model)
        source, source_lengths = pad_token_ids(sources, device)
        target, target_lengths = pad_token_ids(targets, device)
        return cls(
            source=source,
            source_lengths=source_lengths,
            target=target,
            target_lengths=target_lengths,
            decoder_input=shift_right(target, model.config.start_id),
        )

    def compute_states(self, model: Seq2Seq) -> Tensor:
        memory = model.encode(self.source, self.source_lengths)
        return model.decode(self.decoder_input, memory, self.target_lengths)

    def score_tokens(self, model: Seq2Seq, suppressed_tokens: Sequence[int] = ()) -> list[list[float]]:
        """Return the log-probabilities of each row. Logits come in chunks: those of a whole batch need gigabytes."""
        positions = torch.arange(self.target.shape[1], device=self.target.device)
        real = positions < self.target_lengths[:, None]
        states, ids = self.compute_states(model)[real], self.target[real]  # (N, E), (N,) without padding
        size = max(1, MAX_LOGITS // model.config.output_vocab)
        suppressed = torch.tensor(suppressed_tokens, dtype=torch.int64, device=ids.device)
        chunks = []
        for i in range(0, len(ids), size):
            logits, chosen_ids = model.output(states[i : i + size]), ids[i : i + size, None]
            logits = logits if logits.dtype == torch.float64 else logits.float()  # (n, V)
            chosen = logits.gather(1, chosen_ids)
            allowed = logits.index_fill(1, suppressed, float("-inf")).scatter(1, chosen_ids, chosen)
            chunks.append(chosen[:, 0] - allowed.logsumexp(1))
        return [row.tolist() for row in torch.cat(chunks).split(self.target_lengths.tolist())]
