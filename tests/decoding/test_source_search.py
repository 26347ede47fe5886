"""Search of front-end sources: greedy for a beam of one, independent of the batch, and prefixes as forced tokens."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from attent.decoding.engines.reference import SearchCancelled
from attent.decoding.options import Hypothesis, SearchOptions
from attent.decoding.source_search import compute_audio_frames, search_sources
from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import AudioConfig, ImageConfig, StackConfig
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig, train_monolingual_tokenizer
from tests.greedy import greedy_search

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=24, dropout=0.1)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    config = TokenizerConfig(kind="char")
    return train_monolingual_tokenizer(["zero one two three four five six"] * 3, config)


def make_model(
    tokenizer: Tokenizer, frontend: AudioConfig | ImageConfig, end_bias: float = 0.0, *, ctc: bool = False
) -> Seq2Seq:
    """With some large weights, so that attention is sharp and the text depends on the source."""
    torch.manual_seed(3)
    config = Seq2SeqConfig(
        vocab=tokenizer.target.size,
        frontend=frontend,
        encoder=STACK,
        decoder=mirror_encoder(STACK),
        share_embeddings=False,
        tie_output=False,
        output_bias=True,
        start_id=tokenizer.target.start,
        end_id=tokenizer.target.end,
        ctc=ctc,
    )
    model = Seq2Seq(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.startswith(("source", "target", "output")) or "cross_attn.query" in name:
                parameter.mul_(3 if name.startswith("source") else 6)
            if name == "output.bias":
                parameter[config.end_id] = end_bias
    return model


def get_ids(hypotheses: list[Hypothesis]) -> list[tuple[int, ...]]:
    return [hypothesis.token_ids for hypothesis in hypotheses]


@pytest.fixture(scope="module")
def frames() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(4, 60, 8, generator=torch.Generator().manual_seed(0)), torch.tensor([60, 17, 41, 2])


def test_a_beam_of_one_equals_greedy_search(tokenizer: Tokenizer, frames: tuple[torch.Tensor, torch.Tensor]) -> None:
    model = make_model(tokenizer, AudioConfig(mel_bins=8)).eval()
    expected = greedy_search(
        model,
        *frames,
        start_id=model.config.start_id,
        end_id=model.config.end_id,
        max_length=12,
        suppressed_tokens=find_suppressed_tokens(model.config, tokenizer),
    )
    hypotheses = search_sources(model, tokenizer, *frames, SearchOptions(beam_size=1, max_length=12))
    for hypothesis, row in zip(hypotheses, expected.tolist(), strict=True):
        assert [*hypothesis.token_ids, *[model.config.end_id] * (12 - len(hypothesis.token_ids))] == row
        assert hypothesis.text == tokenizer.target.decode(hypothesis.token_ids).strip()
    assert len(set(get_ids(hypotheses))) > 1


@pytest.mark.parametrize("beam_size", [1, 3])
def test_the_rest_of_a_ragged_batch_changes_nothing(
    tokenizer: Tokenizer, frames: tuple[torch.Tensor, torch.Tensor], beam_size: int
) -> None:
    """Its own length limits each recording, also in training mode."""
    model = make_model(tokenizer, AudioConfig(mel_bins=8), end_bias=-3.0)
    options = SearchOptions(beam_size=beam_size, length_penalty=1)
    together = search_sources(model, tokenizer, *frames, options)
    assert model.training
    source, lengths = frames
    for i, length in enumerate(lengths.tolist()):
        (alone,) = search_sources(model, tokenizer, source[i : i + 1, :length], lengths[i : i + 1], options)
        assert alone.token_ids == together[i].token_ids
        assert alone.score == pytest.approx(together[i].score, abs=1e-5)
    assert max(len(x.token_ids) for x in together) > len(together[3].token_ids)


@pytest.mark.parametrize("beam_size", [1, 3])
def test_a_prefix_is_read_before_the_text(
    tokenizer: Tokenizer, frames: tuple[torch.Tensor, torch.Tensor], beam_size: int
) -> None:
    model = make_model(tokenizer, AudioConfig(mel_bins=8))
    prefix = tuple(tokenizer.target.encode(["six"])[0])
    options = SearchOptions(beam_size=beam_size, max_length=9, length_penalty_type="none")
    hypotheses = search_sources(model, tokenizer, *frames, options, prefix_ids=prefix)
    assert get_ids(hypotheses) != get_ids(search_sources(model, tokenizer, *frames, options))
    model.eval()
    for i, hypothesis in enumerate(hypotheses):
        length, ids = int(frames[1][i]), [*hypothesis.token_ids, *[model.config.end_id] * hypothesis.is_finished]
        read = torch.tensor([[model.config.start_id, *prefix, *ids[:-1]]])
        logits = model(frames[0][i : i + 1, :length], read)[0, len(prefix) :]
        logits = logits.index_fill(1, torch.tensor(find_suppressed_tokens(model.config, tokenizer)), float("-inf"))
        expected = logits.log_softmax(-1).gather(1, torch.tensor(ids)[:, None]).sum()
        assert hypothesis.log_prob == pytest.approx(expected.item(), abs=1e-4)


def test_images_options_and_suppressed_tokens(tokenizer: Tokenizer) -> None:
    model = make_model(tokenizer, ImageConfig(image_size=6, patch_size=3, channels=1), end_bias=-30.0)
    pixels = torch.randn(3, 1, 6, 6)
    hypotheses = search_sources(model, tokenizer, pixels, options=SearchOptions(beam_size=2))
    assert [len(ids) for ids in get_ids(hypotheses)] == [100] * 3
    options = SearchOptions(max_length=5, no_repeat_ngram_size=1)
    first = hypotheses[0].token_ids[0]
    for ids in get_ids(search_sources(model, tokenizer, pixels, options=options, suppressed_tokens=[first])):
        assert len(ids) == len(set(ids)) == 5
        assert first not in ids


def test_a_search_can_be_cancelled(tokenizer: Tokenizer, frames: tuple[torch.Tensor, torch.Tensor]) -> None:
    with pytest.raises(SearchCancelled):
        search_sources(make_model(tokenizer, AudioConfig(mel_bins=8)), tokenizer, *frames, should_stop=lambda: True)


def test_audio_frames_have_their_own_length_or_a_fixed_one() -> None:
    recordings, device = [torch.randn(1_600), torch.randn(900)], torch.device("cpu")
    frames, lengths = compute_audio_frames(recordings, AudioConfig(mel_bins=8), device)
    assert frames.shape == (2, 10, 8)
    assert lengths is not None
    assert lengths.tolist() == [10, 6]
    for count in (30, 4):
        config = replace(AudioConfig(mel_bins=8), fixed_frames=count)
        fixed, none = compute_audio_frames(recordings, config, device)
        assert fixed.shape == (2, count, 8)
        assert none is None
