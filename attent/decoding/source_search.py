"""Search the text of audio or images: one batch of front-end sources. Engines search sources of token ids instead."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.decoding.constraints import TargetVocabulary, build_constraints
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck
from attent.decoding.search import SearchContext, make_suppressed_tensor, search_requests
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import AudioConfig, LogMelSpectrogram
from attent.nn.eval_mode import eval_mode
from attent.nn.frontends import HOP_SAMPLES
from attent.text.tokenizer import Tokenizer

FRAMES_PER_TOKEN = 4  # at least: 25 tokens per second; fast speech has some 20 characters per second
MIN_MAX_LENGTH = 10  # tokens that even the shortest recording may have
IMAGE_MAX_LENGTH = 100  # tokens of the text of an image


def search_sources(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    source: Tensor,
    lengths: Tensor | None = None,
    options: SearchOptions | None = None,
    *,
    prefix_ids: Sequence[int] = (),
    suppressed_tokens: Sequence[int] = (),
    should_stop: StopCheck | None = None,
) -> list[Hypothesis]:
    """Return the best hypothesis of each source of a batch, with its text.

    source             log-mel frames (B, T, M) with their lengths, or normalized pixels (B, C, S, S)
    prefix_ids         tokens that the decoder reads before the text, such as a language tag; not part of the result
    suppressed_tokens  never generated, besides those that no target contains
    should_stop        polled at every step; True raises `SearchCancelled`
    """
    options = replace(options or SearchOptions(), n_best=1)
    requests, context = build_source_context(model, tokenizer, source, lengths, options, prefix_ids, suppressed_tokens)
    prompt_ids = (model.config.start_id, *prefix_ids)[:-1]

    def check_cancelled() -> None:
        if should_stop is not None and should_stop():
            raise SearchCancelled

    with eval_mode(model):
        best = search_requests(
            model, source, lengths, requests, context, prompt_ids=prompt_ids, check_cancelled=check_cancelled
        )
    return [add_text(hypotheses[0], tokenizer) for hypotheses in best.to_hypotheses(context.end_id)]


def build_source_context(
    model: Seq2Seq,
    tokenizer: Tokenizer,
    source: Tensor,
    lengths: Tensor | None,
    options: SearchOptions,
    prefix_ids: Sequence[int] = (),
    suppressed_tokens: Sequence[int] = (),
) -> tuple[list[SearchRequest], SearchContext]:
    """Return a request for each source, and the context of their search; see `search_sources`."""
    config, device = model.config, source.device
    max_lengths = compute_max_lengths(model, source, lengths, options, len(prefix_ids))
    requests = [SearchRequest(source_ids=(), rng_key=i, max_length=length) for i, length in enumerate(max_lengths)]
    vocabulary = TargetVocabulary(tokenizer.target, config.output_vocab, [config.end_id], device)
    constraints, _ = build_constraints(options, requests, vocabulary)
    suppressed = (*find_suppressed_tokens(config, tokenizer), *suppressed_tokens)
    context = SearchContext(
        options=options,
        start_id=(config.start_id, *prefix_ids)[-1],
        end_id=config.end_id,
        suppressed_tokens=make_suppressed_tensor(config.start_id, config.end_id, suppressed, device),
        constraints=tuple(constraints),
    )
    return requests, context


def compute_max_lengths(
    model: Seq2Seq, source: Tensor, lengths: Tensor | None, options: SearchOptions, prefix_length: int
) -> list[int]:
    if options.max_length is not None:
        max_lengths = [options.max_length] * len(source)
    elif isinstance(model.config.frontend, AudioConfig):
        num_frames = [source.shape[1]] * len(source) if lengths is None else lengths.tolist()
        max_lengths = [MIN_MAX_LENGTH + frames // FRAMES_PER_TOKEN for frames in num_frames]
    else:
        max_lengths = [IMAGE_MAX_LENGTH] * len(source)
    positions = model.decoder.positions.max_length
    # The decoder reads the start token too, and word times need the state after the last token.
    return [length if positions is None else min(length, positions - 1 - prefix_length) for length in max_lengths]


def add_text(hypothesis: Hypothesis, tokenizer: Tokenizer) -> Hypothesis:
    token_ids, target = hypothesis.token_ids, tokenizer.target
    return replace(hypothesis, text=target.decode(token_ids).strip(), tokens=tuple(target.to_pieces(token_ids)))


def compute_audio_frames(
    recordings: Sequence[Tensor], config: AudioConfig, device: torch.device
) -> tuple[Tensor, Tensor | None]:
    """Return source and lengths of recordings, (S,) samples each; no lengths if padded to the config's frames."""
    samples = torch.nn.utils.rnn.pad_sequence([x.to(device) for x in recordings], batch_first=True)
    compute_frames = LogMelSpectrogram(config.mel_bins).to(device)
    if config.fixed_frames is not None:
        size = config.fixed_frames * HOP_SAMPLES
        return compute_frames(F.pad(samples[:, :size], (0, max(0, size - samples.shape[1]))))[0], None
    return compute_frames(samples, torch.tensor([len(x) for x in recordings], device=device))
