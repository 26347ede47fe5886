"""Front-ends: log-mel frames equal Whisper's, and models of audio and images know nothing of padding."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import WhisperFeatureExtractor

from attent.models import Seq2Seq, Seq2SeqConfig
from attent.models.config import mirror_encoder
from attent.nn import AudioConfig, ImageConfig, LogMelSpectrogram, StackConfig

STACK = StackConfig(layers=1, width=16, heads=2, ffn_width=24, dropout=0.0)
SPEECH = Seq2SeqConfig(
    vocab=9, frontend=AudioConfig(mel_bins=5), encoder=STACK, decoder=mirror_encoder(STACK), share_embeddings=False
)
CAPTION = replace(SPEECH, frontend=ImageConfig(image_size=6, patch_size=3, channels=1))
WHISPER_SAMPLES = 480_000  # it pads every recording to 30 seconds


def make_recordings() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    lengths_and_levels = ((16_000, 0.1), (5_321, 0.5), (WHISPER_SAMPLES, 0.3), (160, 0.1), (1, 0.5), (200, 0.3))
    recordings = [torch.randn(n, generator=generator) * level for n, level in lengths_and_levels]
    return [x * torch.linspace(0.001, 1, len(x)) for x in recordings] + [torch.zeros(900)]


@pytest.mark.parametrize("mel_bins", [80, 128])
def test_log_mel_frames_equal_those_of_whisper(mel_bins: int) -> None:
    recordings, compute_frames = make_recordings(), LogMelSpectrogram(mel_bins)
    extract = WhisperFeatureExtractor(feature_size=mel_bins)
    padded = torch.stack([torch.nn.functional.pad(x, (0, WHISPER_SAMPLES - len(x))) for x in recordings])
    # Its numpy code computes in float64; its torch code differs from that by up to 1.3e-5.
    features = extract._np_extract_fbank_features(padded.numpy(), device="cpu")
    expected = torch.from_numpy(np.asarray(features)).transpose(1, 2).float()
    frames, num_frames = compute_frames(padded)
    assert num_frames.tolist() == [3_000] * len(recordings)
    torch.testing.assert_close(frames, expected, atol=1e-5, rtol=0)

    lengths = torch.tensor([len(x) for x in recordings])
    frames, num_frames = compute_frames(torch.nn.utils.rnn.pad_sequence(recordings, batch_first=True), lengths)
    assert num_frames.tolist() == [100, 34, 3_000, 1, 1, 2, 6]
    for row, full, count in zip(frames, expected, num_frames.tolist(), strict=True):
        count = min(count, 2_998)  # Whisper mirrors the end of its 30 seconds
        torch.testing.assert_close(row[:count], full[:count], atol=1e-5, rtol=0)
    assert not frames[0, 100:].any()


def test_log_mel_frames_of_a_recording_do_not_depend_on_its_batch() -> None:
    recordings, compute_frames = make_recordings(), LogMelSpectrogram()
    lengths = torch.tensor([len(x) for x in recordings])
    noise = torch.randn(len(recordings), WHISPER_SAMPLES)
    for row, x in zip(noise, recordings, strict=True):
        row[: len(x)] = x
    batch, num_frames = compute_frames(noise, lengths)
    for i, x in enumerate(recordings):
        frames, _ = compute_frames(x[None], lengths[i : i + 1])
        assert torch.equal(frames[0], batch[i, : num_frames[i]])


def test_a_model_of_audio_ignores_padding() -> None:
    model = Seq2Seq(SPEECH).eval()
    frames, target, lengths = torch.randn(2, 12, 5), torch.randint(0, 9, (2, 5)), torch.tensor([12, 7])
    logits = model(frames, target, lengths)
    assert logits.shape == (2, 5, 9)
    changed = frames.clone()
    changed[1, 7:] += 1
    torch.testing.assert_close(model(changed, target, lengths), logits)
    torch.testing.assert_close(model(frames[1:, :7], target[1:]), logits[1:])
    cache = model.init_decoder_state(frames, lengths, capacity=5)
    torch.testing.assert_close(model.step(target, cache), logits)
    assert model.encode(frames, lengths).lengths.tolist() == [6, 4]


def test_a_model_of_images_reads_a_class_token_and_patches() -> None:
    pixels, target = torch.randn(2, 1, 6, 6), torch.randint(0, 9, (2, 5))
    model = Seq2Seq(CAPTION).eval()
    assert model.encode(pixels).states.shape == (2, 5, 16)
    logits = model(pixels, target)
    torch.testing.assert_close(model.step(target, model.init_decoder_state(pixels, capacity=5)), logits)
    without = Seq2Seq(replace(CAPTION, frontend=replace(CAPTION.frontend, class_token=False)))
    assert without.encode(pixels).states.shape == (2, 4, 16)


def test_stacks_of_different_width_are_joined_by_a_projection() -> None:
    model = Seq2Seq(replace(SPEECH, decoder=replace(SPEECH.decoder, width=24))).eval()
    assert model.encode(torch.randn(2, 12, 5)).states.shape == (2, 6, 24)
    assert model(torch.randn(2, 12, 5), torch.randint(0, 9, (2, 4))).shape == (2, 4, 9)


@pytest.mark.parametrize(
    ("config", "source", "message"),
    [
        (SPEECH, torch.zeros(1, 4, 6), r"log-mel frames of \(B, T, 5\), but is of \(1, 4, 6\)"),
        (SPEECH, [[1]], "log-mel frames .* but is a list"),
        (CAPTION, torch.zeros(1, 3, 6, 6), r"pixels must be floating numbers of \(B, 1, 6, 6\)"),
    ],
)
def test_a_source_of_another_shape_is_refused(config: Seq2SeqConfig, source: Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Seq2Seq(config)(source, torch.zeros(1, 2, dtype=torch.int64))


def test_settings_that_need_token_ids_are_refused() -> None:
    with pytest.raises(ValueError, match="`share_embeddings` must be false with a `frontend`"):
        replace(SPEECH, share_embeddings=True)
    with pytest.raises(ValueError, match="`ctc` must be false unless the `frontend` is audio"):
        replace(CAPTION, ctc=True)
    with pytest.raises(ValueError, match="`mel_bins` must be a number from 1"):
        AudioConfig(mel_bins=0)
    with pytest.raises(ValueError, match="`fixed_frames` must be a number from 1"):
        AudioConfig(fixed_frames=0)


def test_ctc_logits_are_a_second_output() -> None:
    model = Seq2Seq(replace(SPEECH, ctc=True))
    assert model.ctc_output is not None
    assert model.ctc_output(model.encode(torch.randn(1, 8, 5)).states).shape == (1, 4, 9)


def test_states_of_audio_are_scaled_as_token_embeddings_are() -> None:
    model, frames = Seq2Seq(SPEECH), torch.randn(2, 12, 5)
    plain = Seq2Seq(replace(SPEECH, scale_embeddings=False))
    plain.load_state_dict(model.state_dict())
    states, expected = (each.source_embedding.embed_source(frames, None)[0] for each in (model, plain))
    torch.testing.assert_close(states, expected * 4)  # sqrt(16)


def test_filters_and_windows_are_not_saved() -> None:
    assert LogMelSpectrogram().state_dict() == {}


@pytest.mark.parametrize("length", [160, 200, 201])
def test_a_short_row_is_padded_before_its_start_is_mirrored(length: int) -> None:
    samples = torch.randn(1, length, generator=torch.Generator().manual_seed(0))
    frames, num_frames = LogMelSpectrogram()(samples)
    assert num_frames.tolist() == [length // 160]
    padded = torch.nn.functional.pad(samples, (0, 201 - length))
    torch.testing.assert_close(frames, LogMelSpectrogram()(padded)[0][:, : length // 160])
