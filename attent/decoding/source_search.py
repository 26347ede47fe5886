"""Search the text of audio or images, one batch of front-end sources, and caption images.

Engines search sources of token ids instead; `transcriber` searches recordings of any length.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

import torch
import torch.nn.functional as F
from torch import Tensor

from attent.data.images import ImageError, ImageShape, read_image
from attent.decoding.constraints import TargetVocabulary, build_constraints
from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.loading import load_tokenizer, resolve_device_and_dtype, resolve_target_lang
from attent.decoding.options import Hypothesis, SearchOptions, SearchRequest, StopCheck
from attent.decoding.search import SearchContext, make_suppressed_tensor, search_requests
from attent.interop import load_as
from attent.models import Seq2Seq
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import AudioConfig, ImageConfig, LogMelSpectrogram
from attent.nn.eval_mode import eval_mode
from attent.nn.frontends import HOP_SAMPLES, normalize_pixels
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
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


# --- captions of images ----------------------------------------------------------------------------------------------


BATCH_IMAGES = {"cpu": 16, "cuda": 256}


class Captioner:
    """A caption model with its tokenizer.

    >>> captioner = attent.Captioner.load("runs/captions")
    >>> captioner.caption(["picture.png"])
    [Hypothesis('...', score=-...)]
    """

    def __init__(self, model: Seq2Seq, tokenizer: Tokenizer, *, name: str = "the model") -> None:
        """`name` is that of the model in error messages."""
        config = model.config.frontend
        if not isinstance(config, ImageConfig):
            raise AttentError(f"{name}: must be a caption model, whose source is an image, but is not")
        self.model, self.tokenizer, self.name, self.image_config = model, tokenizer, name, config

    @classmethod
    def load(cls, folder: str | Path, *, device: str | torch.device | None = None, dtype: str | None = None) -> Self:
        """Load a model folder; `dtype` None: float32."""
        path = locate_model(folder)
        placed, precision = resolve_device_and_dtype(device, dtype or "float32")
        model = load_as(path, Seq2Seq, frontend=ImageConfig, dtype=precision, device=placed)
        return cls(model, load_tokenizer(path), name=str(folder))

    @property
    def languages(self) -> tuple[str, ...]:
        return self.tokenizer.target.tags

    def resolve_language(self, to: str | None) -> str | None:
        return resolve_target_lang(to, self.languages, Path(self.name))

    def read_image(self, file: str | Path) -> Tensor:
        """Return an image as the model takes it, (C, S, S) of uint8; raises `ImageError`."""
        return read_image(file, ImageShape.from_config(self.image_config))

    def caption(
        self,
        images: Sequence[str | Path | Tensor],
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        should_stop: StopCheck | None = None,
    ) -> list[Hypothesis]:
        """Caption image files, or images that `read_image` has returned.

        to           the language, for a model of several
        should_stop  polled during the search; True raises `SearchCancelled`
        """
        captions: list[Hypothesis] = []
        for result in self.caption_all(images, options, to=to, should_stop=should_stop):
            if isinstance(result, ImageError):
                raise result
            captions.append(result)
        return captions

    def caption_all(
        self,
        images: Sequence[str | Path | Tensor],
        options: SearchOptions | None = None,
        *,
        to: str | None = None,
        should_stop: StopCheck | None = None,
    ) -> Iterator[Hypothesis | ImageError]:
        """Yield the caption of each image in their order, or the error for one that cannot be read."""
        language = self.resolve_language(to)
        prefix_ids = () if language is None else (self.tokenizer.target.get_tag_id(language),)
        parameter = next(self.model.parameters())
        batch_size = BATCH_IMAGES.get(parameter.device.type, 64)
        for start in range(0, len(images), batch_size):
            batch: list[Tensor | ImageError] = []
            for image in images[start : start + batch_size]:
                try:
                    batch.append(image if isinstance(image, Tensor) else self.read_image(image))
                except ImageError as error:
                    batch.append(error)
            pixels = [image for image in batch if isinstance(image, Tensor)]
            captions: list[Hypothesis] = []
            if pixels:
                source = normalize_pixels(torch.stack(pixels), self.image_config, parameter)
                captions = search_sources(
                    self.model, self.tokenizer, source, None, options, prefix_ids=prefix_ids, should_stop=should_stop
                )
            yield from (captions.pop(0) if isinstance(image, Tensor) else image for image in batch)
