"""Speech recognition: batches, augmentation, the loss, and a run from recordings to a recognizer."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from attent import load
from attent.cli import main
from attent.data.audio import AudioDataConfig, Recording, RecordingDataset, has_translations
from attent.decoding.options import SearchOptions
from attent.decoding.source_search import FRAMES_PER_TOKEN, MIN_MAX_LENGTH
from attent.decoding.transcriber import Transcriber
from attent.models import Seq2Seq, shift_right
from attent.nn import ImageConfig, StackConfig
from attent.nn.frontends import HOP_SAMPLES, SAMPLE_RATE
from attent.text.tokenizer import Tokenizer
from attent.text.tokenizer_training import TokenizerConfig
from attent.training.config import DataConfig, RunConfig, TrainError, read_run
from attent.training.tasks.base import RunContext
from attent.training.tasks.speech import SpeechTask, build_speech_config, choose_tokenizer, find_splits
from attent.training.tasks.speech_batches import (
    SpeechBatch,
    SpeechLoader,
    SpeechObjective,
    change_speed,
    count_states,
    draw_spans,
    mark_spans,
)
from tests.interop.families import make_whisper
from tests.interop.test_whisper import END, START, TIMESTAMPS, VOCAB
from tests.text.imported_tokenizers import whisper_folder
from tests.training.runs import fingerprint

PLAIN = AudioDataConfig(speed_perturbation=(1.0,), time_masks=0, frequency_masks=0)
MELS = 16
SMALL = ["--set", "model.layers=1", "--set", "model.width=16", "--set", "model.heads=2", "--set", "model.ffn_width=32"]
TONES = {"a": 400, "b": 800, "c": 1600, "d": 3200}  # Hz: the letter that is spoken


def speak(text: str, rng: np.random.Generator, seconds: float = 0.12) -> np.ndarray:
    """A tone of `seconds` for each letter, with noise."""
    time = np.arange(int(seconds * SAMPLE_RATE)) / SAMPLE_RATE
    tones = [0.3 * np.sin(2 * np.pi * TONES[letter] * time) for letter in text.replace(" ", "")]
    return np.concatenate(tones) + rng.normal(0, 0.01, len(tones) * len(time))


def draw_texts(count: int, seed: int) -> list[str]:
    rng = np.random.default_rng(seed)
    return [" ".join(rng.choice(list(TONES), rng.integers(1, 6))) for _ in range(count)]


def make_recordings(count: int = 40, seed: int = 0) -> RecordingDataset:
    rng, texts = np.random.default_rng(seed), draw_texts(count, seed)
    samples = [(speak(text, rng) * 32767).astype("<i2") for text in texts]
    num_samples = np.array([len(x) for x in samples])
    offsets = num_samples.cumsum() - num_samples
    return RecordingDataset("tones", np.concatenate(samples), offsets, num_samples, tuple(texts))


def make_loader(config: AudioDataConfig | None = PLAIN, batch_tokens: int = 200, **options: object) -> SpeechLoader:
    recordings = make_recordings()
    targets = [[*(4 + "abcd".index(letter) for letter in text.split()), 2] for text in recordings.texts]
    return SpeechLoader(recordings, targets, 0, config, batch_tokens=batch_tokens, mel_bins=MELS, **options)  # type: ignore[arg-type]


def make_model(**changes: object) -> Seq2Seq:
    torch.manual_seed(0)
    config = build_speech_config("tiny", 8)
    stack = {"layers": 1, "width": 32, "heads": 2, "ffn_width": 64, "dropout": 0.0}
    assert isinstance(config.encoder, StackConfig)
    encoder, decoder = replace(config.encoder, **stack), replace(config.decoder, **stack)
    frontend = replace(config.frontend, mel_bins=MELS, **changes)
    return Seq2Seq(replace(config, encoder=encoder, decoder=decoder, frontend=frontend))


# ---- batches ---------------------------------------------------------------------------------------------------------


def test_an_epoch_has_every_recording_once_in_batches_of_the_budget() -> None:
    batches = make_loader()
    loaded = [batches.get_batch(1, index) for index in range(batches.num_batches(1))]
    assert sorted(np.concatenate([batch.example_ids for batch in loaded]).tolist()) == list(range(40))
    assert len(loaded) > 3
    for batch in loaded:
        assert batch.num_padded_tokens <= 200
        states = count_states(batch.num_samples, None)
        assert batch.row_length == max(states.max(), batch.target.ids.shape[1])
        assert batch.num_tokens == states.sum() + batch.target.num_tokens
        for row, index in enumerate(batch.example_ids):
            samples = batches.recordings.get_samples(index)
            assert np.array_equal(batch.samples[row, : len(samples)], samples)
            assert not batch.samples[row, len(samples) :].any()
            assert batch.target.ids[row, : batch.target.lengths[row]].tolist() == list(batches.targets[index])


def test_a_batch_holds_at_least_the_longest_recording() -> None:
    batches = make_loader(batch_tokens=8)
    loaded = [batches.get_batch(0, index) for index in range(batches.num_batches(0))]
    longest = int(count_states(batches.recordings.num_samples, None).max())
    assert max(batch.num_padded_tokens for batch in loaded) == longest > 8
    assert sum(map(len, loaded)) == 40


def test_a_batch_depends_on_seed_epoch_and_index_alone() -> None:
    first, again, other = (make_loader(AudioDataConfig(), seed=seed) for seed in (1, 1, 2))
    list(zip(range(5), first.iter_batches(workers=2), strict=False))  # iterating changes nothing

    def describe(batch: SpeechBatch) -> list[object]:
        tensors = (batch.samples, batch.speeds, batch.lengths, batch.time_masks, batch.frequency_masks)
        return [batch.example_ids.tolist(), *(x.tolist() for x in tensors if x is not None)]

    expected = describe(first.get_batch(2, 1))
    assert describe(again.get_batch(2, 1)) == expected
    for changed in (first.get_batch(2, 2), first.get_batch(1, 1), other.get_batch(2, 1)):
        assert all(x != y for x, y in zip(describe(changed), expected, strict=True))


def test_validation_batches_are_not_augmented_and_always_the_same() -> None:
    batches = make_loader(None)
    for index in range(batches.num_batches(0)):
        batch, again = batches.get_batch(0, index), batches.get_batch(3, index)
        assert batch.speeds is None
        assert batch.time_masks.shape == batch.frequency_masks.shape == (len(batch), 0, 2)
        assert np.array_equal(batch.example_ids, again.example_ids)


# ---- augmentation ----------------------------------------------------------------------------------------------------


def test_the_speed_changes_pitch_and_length() -> None:
    time = torch.arange(8_000) / SAMPLE_RATE
    samples = torch.sin(2 * torch.pi * 500 * time)[None].repeat(3, 1)
    played = change_speed(samples, torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), 4_000)
    assert torch.equal(played[1], samples[1, :4_000])
    spectrum = torch.fft.rfft(played).abs()
    assert [SAMPLE_RATE / 4_000 * int(row.argmax()) for row in spectrum] == pytest.approx([250, 500, 1000], abs=3)


def test_speeds_are_drawn_from_the_config_and_counted_in_the_plan() -> None:
    batches = make_loader(replace(PLAIN, speed_perturbation=(0.5, 1.0, 2.0)))
    loaded = [batches.get_batch(0, index) for index in range(batches.num_batches(0))]
    speeds = torch.cat([batch.speeds for batch in loaded if batch.speeds is not None])
    assert set(speeds.tolist()) == {0.5, 1.0, 2.0}
    for batch in loaded:
        original = batches.recordings.num_samples[batch.example_ids]
        assert batch.speeds is not None
        assert batch.num_samples.tolist() == np.ceil(original / batch.speeds.numpy()).tolist() == batch.lengths.tolist()
        assert batch.num_padded_tokens <= 200


def test_a_window_of_fixed_length_is_never_exceeded() -> None:
    batches = make_loader(replace(PLAIN, speed_perturbation=(0.5,)), fixed_frames=65)
    longest = max(int(batches.get_batch(0, index).num_samples.max()) for index in range(batches.num_batches(0)))
    assert longest <= 65 * 160
    assert {batches.get_batch(0, index).row_length for index in range(batches.num_batches(0))} == {32}


def test_masked_spans_are_inside_of_the_row_and_not_too_long() -> None:
    sizes, longest = np.array([5, 100, 1]), np.array([9, 10, 0])
    spans = np.concatenate([draw_spans(4, longest, sizes, np.random.default_rng(seed)) for seed in range(200)])
    lengths = (spans[..., 1] - spans[..., 0]).reshape(200, 3, 4)
    assert spans.min() == 0
    assert [lengths[:, row].max() for row in range(3)] == [5, 10, 0]
    assert [spans.reshape(200, 3, 4, 2)[:, row].max() for row in range(3)] == [5, 100, 1]
    assert lengths.min() == 0


def test_marked_spans_are_half_open() -> None:
    spans = torch.tensor([[[1, 3], [4, 4]], [[0, 1], [3, 5]]])
    assert mark_spans(spans, 5).tolist() == [[False, True, True, False, False], [True, False, False, True, True]]


def test_masked_frames_and_bins_are_the_mean_of_the_recording() -> None:
    objective, batch = SpeechObjective(make_model()), make_loader().get_batch(0, 0)
    frames, num_frames = objective.compute_frames(batch)
    B = len(batch)
    masked = replace(
        batch,
        time_masks=torch.tensor([[[2, 4]]]).expand(B, 1, 2),
        frequency_masks=torch.tensor([[[5, 9]]]).expand(B, 1, 2),
    )
    changed, _ = objective.compute_frames(masked)
    assert num_frames is not None
    for row, count in enumerate(num_frames.tolist()):
        mean = frames[row, :count].mean()
        assert torch.allclose(changed[row, 2:4], mean, atol=1e-5)
        assert torch.allclose(changed[row, :count, 5:9], mean, atol=1e-5)
        assert torch.equal(changed[row, 4:, 9:], frames[row, 4:, 9:])
        assert torch.equal(changed[row, :2, :5], frames[row, :2, :5])


# ---- the loss --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ctc", [0.0, 0.3])
@pytest.mark.parametrize("fixed_frames", [None, 80])
def test_the_loss_is_the_sum_over_slices(ctc: float, fixed_frames: int | None) -> None:
    """Whatever the padding: every slice has its own width."""
    objective = SpeechObjective(make_model(fixed_frames=fixed_frames), smoothing=0.1, ctc=ctc).double()
    batches = make_loader(AudioDataConfig(), 400, fixed_frames=fixed_frames)
    batch = max((batches.get_batch(0, index) for index in range(batches.num_batches(0))), key=len)
    whole, entropy = objective(batch)
    parts = [objective(batch.slice_rows(row, row + 2)) for row in range(0, len(batch), 2)]
    assert len(parts) > 2
    assert torch.allclose(whole, torch.stack([part[0] for part in parts]).sum(), rtol=1e-5)
    assert torch.allclose(entropy, torch.stack([part[1] for part in parts]).sum(), rtol=1e-5)
    assert sum(batch.slice_rows(row, row + 2).num_targets for row in range(0, len(batch), 2)) == batch.num_targets
    assert not entropy.requires_grad


def test_ctc_is_weighted_against_the_cross_entropy_in_training_only() -> None:
    model, batch = make_model(), make_loader().get_batch(0, 0)
    plain, half = (SpeechObjective(model, smoothing=0.1, ctc=ctc) for ctc in (0.0, 0.5))
    memory = model.encode(*half.compute_frames(batch))
    log_probs = model.ctc_output(memory.states).log_softmax(-1)  # type: ignore[misc]
    expected = 0.0
    for row, ids in enumerate(batch.target.ids):
        assert memory.lengths is not None
        assert batch.target.lengths is not None
        length, text = int(memory.lengths[row]), ids[: batch.target.lengths[row] - 1]
        row_log_probs = log_probs[row, :length, None].detach()
        expected += float(F.ctc_loss(row_log_probs, text[None], [length], [len(text)], blank=1, reduction="sum"))
    with torch.no_grad():
        assert float(half(batch)[0]) == pytest.approx(0.5 * float(plain(batch)[0]) + 0.5 * expected, rel=1e-5)
        assert float(half.eval()(batch)[0]) == pytest.approx(float(plain.eval()(batch)[0]))


def test_a_text_too_long_for_its_recording_does_not_make_ctc_infinite() -> None:
    objective, batch = SpeechObjective(make_model(), ctc=0.3), make_loader().get_batch(0, 0)
    loss = objective(replace(batch, lengths=batch.lengths.clamp(max=320)))[0]
    loss.backward()
    assert loss.isfinite()


def test_given_prefixes_are_not_part_of_the_loss() -> None:
    """Of Whisper's prompt, for example; nor of the text of the CTC loss."""
    objective, batch = SpeechObjective(make_model(), ctc=0.5), make_loader(None).get_batch(0, 0)
    assert batch.target.lengths is not None
    prefixed = F.pad(batch.target.ids, (1, 0), value=3)
    target = replace(batch.target, ids=prefixed, lengths=batch.target.lengths + 1)
    target = replace(target, num_tokens=batch.target.num_tokens + len(batch))
    prefixed_batch = replace(batch, target=target, prefix_length=1)
    assert prefixed_batch.num_targets == batch.num_targets
    frames, lengths = objective.compute_frames(batch)
    log_probs = objective.model(frames, shift_right(prefixed, 1), lengths).log_softmax(-1)[:, 1:]
    each = log_probs.gather(-1, batch.target.ids[..., None])[..., 0]
    loss, entropy = objective(prefixed_batch)
    assert float(entropy) == pytest.approx(-float((each * batch.target.token_mask()).sum().detach()), rel=1e-5)
    ctc = objective.compute_ctc_loss(objective.model.encode(frames, lengths), batch)
    assert float(loss.detach()) == pytest.approx(0.5 * (float(entropy) + float(ctc.detach())), rel=1e-5)


def test_tones_are_learned() -> None:
    """The entropy of the texts alone is 1.3 nats per token."""
    model = make_model()
    objective = SpeechObjective(model, ctc=0.3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for (_, batch), _ in zip(make_loader(batch_tokens=400, seed=1).iter_batches(workers=0), range(110), strict=False):
        loss, entropy = objective(batch)
        (loss / batch.num_targets).backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(entropy) / batch.num_targets)
    assert losses[0] > 1.5
    assert np.mean(losses[-10:]) < 0.8


# ---- settings --------------------------------------------------------------------------------------------------------


def test_sizes_grow_and_encoders_are_deeper_than_decoders() -> None:
    configs = [build_speech_config(size, 100) for size in ("tiny", "small", "base", "big")]  # type: ignore[arg-type]
    shapes = [(config.encoder.layers, config.decoder.layers, config.encoder.width) for config in configs]
    assert shapes == [(4, 2, 128), (8, 4, 256), (12, 6, 512), (16, 8, 768)]
    assert all(config.encoder.norm_order == "pre" for config in configs)  # type: ignore[union-attr]


def test_the_tokens_are_characters_where_there_is_little_text() -> None:
    config = TokenizerConfig(symbols=("%s",))
    assert choose_tokenizer(config, 900_000) == replace(config, kind="char")
    assert choose_tokenizer(config, 5_000_000) == replace(config, vocab=2_240)
    assert choose_tokenizer(config, 10**12).vocab == 32_768


@pytest.mark.parametrize(
    ("src", "tgt", "expected"),
    [(None, None, False), ("en", None, False), (None, "de", True), ("en", "de", True), ("en", "en-GB", False)],
)
def test_texts_in_another_language_are_translations(src: str | None, tgt: str | None, expected: bool) -> None:
    assert has_translations(src, tgt) == expected


# ---- runs ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("src", "tgt", "expected"), [(None, None, "one"), ("en", None, "one"), ("en", "de", "eins"), ("en", "fr", "uno")]
)
def test_the_text_is_the_column_of_the_language(
    tmp_path: Path, src: str | None, tgt: str | None, expected: str
) -> None:
    table = tmp_path / "corpus.tsv"
    table.write_text("path\tsentence\ttranslation\tde\na.wav\tone\tuno\teins\n", encoding="utf-8")
    ((_, recordings),) = find_splits(DataConfig(train=(str(table),), src=src, tgt=tgt))["train"]
    assert [recording.text for recording in recordings] == [expected]


def write_corpus(folder: Path, counts: tuple[int, ...] = (30, 6, 4)) -> Path:
    soundfile = pytest.importorskip("soundfile")
    folder.mkdir()
    for seed, (split, count) in enumerate(zip(("train", "valid", "test"), counts, strict=False)):
        rng, lines = np.random.default_rng(seed), []
        for number, text in enumerate(draw_texts(count, seed)):
            soundfile.write(folder / f"{split}{number}.wav", speak(text, rng), SAMPLE_RATE)
            lines.append(f"{split}{number}.wav\t{text}\n")
        (folder / f"{split}.tsv").write_text("".join(lines), encoding="utf-8")
    return folder


def train(data: Path, out: Path, *more: str) -> int:
    command = ["train", "--task", "speech", "--data", str(data), "--out", str(out), "--quiet", "--device", "cpu"]
    return main([*command, "--precision", "float32", "--threads", "1", "--beam-size", "2", *more])


STEPS = ["--valid-every", "4", "--save-every", "4", "--batch-tokens", "100", "--warmup", "2", "--keep-last", "2"]


def test_a_resumed_run_gives_the_same_weights(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "set")
    settings = [*STEPS, "--schedule", "inverse_sqrt", "--src", "en", "--average", "0", *SMALL]
    assert train(data, tmp_path / "halves", "--steps", "4", *settings) == 0
    assert train(data, tmp_path / "halves", "--steps", "8", *settings) == 0
    assert train(data, tmp_path / "whole", "--steps", "8", *settings) == 0
    halves, whole = fingerprint(tmp_path / "halves"), fingerprint(tmp_path / "whole")
    assert halves == whole
    scores = json.loads((tmp_path / "whole" / "state" / "finished.json").read_text())["scores"]
    assert [(score["split"], score["num_examples"]) for score in scores] == [("validation", 6), ("test", 4)]
    assert {"wer", "cer", "exact"} <= scores[0]["metrics"].keys()
    card = (tmp_path / "whole" / "card.md").read_text()
    assert "attent transcribe" in card
    assert "en speech recognizer" in card
    model = load(tmp_path / "whole")
    assert isinstance(model, Seq2Seq)
    assert model.config.ctc


def test_a_model_is_fine_tuned_with_lora(tmp_path: Path) -> None:
    data = write_corpus(tmp_path / "set", (12,))
    steps = ["--steps", "2", "--batch-tokens", "100", "--hold-out", "2"]
    assert train(data, tmp_path / "first", *steps, "--ctc", "0", *SMALL) == 0
    assert train(data, tmp_path / "second", *steps, "--from", str(tmp_path / "first"), "--lora", "2") == 0
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert isinstance(first, Seq2Seq)
    assert not first.config.ctc
    assert first.config == second.config
    names = [name for name, value in first.state_dict().items() if not torch.equal(value, second.state_dict()[name])]
    assert names
    assert all("attn" in name or "feedforward" in name for name in names)


def test_whisper_is_fine_tuned_and_exported(tmp_path: Path) -> None:
    """Its tokenizer and the settings of its search are kept."""
    transformers = pytest.importorskip("transformers")
    config = transformers.WhisperConfig(
        vocab_size=321, num_mel_bins=8, d_model=8, max_source_positions=50, max_target_positions=30,
        encoder_layers=1, decoder_layers=1, encoder_attention_heads=1, decoder_attention_heads=1, encoder_ffn_dim=8,
        decoder_ffn_dim=8, pad_token_id=300, bos_token_id=300, eos_token_id=300, decoder_start_token_id=301,
        begin_suppress_tokens=None,
    )  # fmt: skip
    model, whisper = transformers.WhisperForConditionalGeneration(config), whisper_folder(tmp_path / "whisper", 10)
    model.generation_config.suppress_tokens = [5]
    model.save_pretrained(whisper)
    data = write_corpus(tmp_path / "set", (12,))
    steps = ["--steps", "2", "--batch-tokens", "100", "--hold-out", "2", "--src", "en", "--lora", "2"]
    assert train(data, tmp_path / "tuned", *steps, "--from", str(whisper)) == 0
    assert main(["convert", str(tmp_path / "tuned"), str(tmp_path / "out"), "--to", "hf"]) == 0
    for name in ("tokenizer.json", "generation_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (whisper / name).read_bytes()
    tuned = transformers.WhisperForConditionalGeneration.from_pretrained(tmp_path / "out")
    names = [name for name, value in model.state_dict().items() if not torch.equal(value, tuned.state_dict()[name])]
    assert names
    assert all("proj" in name or "fc" in name for name in names)


def write_whisper(folder: Path) -> Path:
    """A random model with windows of 0.9 seconds."""
    tokens = {**dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id"), END), "decoder_start_token_id": START}
    sizes = {"vocab_size": VOCAB, "num_mel_bins": 8, "max_source_positions": 45, "max_target_positions": 24}
    make_whisper(0, **tokens, **sizes).float().save_pretrained(folder)
    return whisper_folder(folder, TIMESTAMPS)


def test_whisper_is_fine_tuned_with_its_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data, origin = write_corpus(tmp_path / "set", (12,)), str(write_whisper(tmp_path / "whisper"))
    settings = ["--steps", "2", "--batch-tokens", "200", "--hold-out", "2", "--from", origin]
    assert train(data, tmp_path / "out", *settings) == 1
    assert "the language of the recordings must be given" in capsys.readouterr().err
    assert train(data, tmp_path / "out", *settings, "--src", "de") == 0
    tuned, first = load(tmp_path / "out"), load(origin)
    assert tuned.config == first.config
    assert any(not torch.equal(value, first.state_dict()[name]) for name, value in tuned.state_dict().items())
    run = read_run(tmp_path / "out" / "run.toml")
    assert run.data.audio is not None
    assert (run.data.audio.max_seconds, run.train.ctc) == (0.9, 0.0)
    context = RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=lambda event: None)
    task = SpeechTask(run, Tokenizer.load(tmp_path / "out"), context)
    vocabulary = task.tokenizer.target
    assert vocabulary.to_pieces(task.prefix_ids) == ["<|de|>", "<|transcribe|>", "<|notimestamps|>"]
    batch = task.build_train_batches(run).get_batch(0, 0)
    assert batch.prefix_length == 3
    assert batch.fixed_frames == 90
    text = task.train_data.texts[batch.example_ids[0]]
    assert batch.target.lengths is not None
    ids = batch.target.ids[0, : batch.target.lengths[0]].tolist()
    assert tuple(ids[:3]) == task.prefix_ids
    assert vocabulary.decode(ids[3:-1]) == f" {text}"
    assert ids[-1] == vocabulary.end
    long_texts = replace(
        task.train_data, texts=("a b c d e f g h i j k l m n o p q r s t u v", *task.train_data.texts[1:])
    )
    loader = task.build_batches(long_texts, run, 200)
    assert "1 of 10 recordings have texts of more than 24 tokens" in (loader.describe_too_long() or "")
    (Path(origin) / "generation_config.json").write_text('{"is_multilingual": false}')  # of English only
    task = SpeechTask(run, Tokenizer.load(tmp_path / "out"), context)
    assert vocabulary.to_pieces(task.prefix_ids) == ["<|notimestamps|>"]


def test_a_whisper_that_is_fine_tuned_to_translate_is_searched_as_in_training(tmp_path: Path) -> None:
    """With its task, and the tokens that it suppresses; of one recording, not of 1 recordings."""
    data, origin = write_corpus(tmp_path / "set", (12,)), write_whisper(tmp_path / "whisper")
    banned = {"suppress_tokens": list(range(250)), "begin_suppress_tokens": [251, END]}
    (origin / "generation_config.json").write_text(json.dumps(banned))
    settings = ["--steps", "2", "--batch-tokens", "200", "--hold-out", "1", "--from", str(origin)]
    assert train(data, tmp_path / "out", *settings, "--src", "en", "--tgt", "de") == 0
    loaded = Transcriber.load(tmp_path / "out", device="cpu")
    pieces = loaded.tokenizer.target.to_pieces(loaded.get_prefix())
    assert pieces == ["<|en|>", "<|translate|>", "<|notimestamps|>"]
    requested = Transcriber.load(tmp_path / "out", device="cpu", language="de", task="transcribe")
    assert loaded.tokenizer.target.to_pieces(requested.get_prefix())[:2] == ["<|de|>", "<|transcribe|>"]
    run = read_run(tmp_path / "out" / "run.toml")
    context = RunContext(data_dir=tmp_path / "data", device=torch.device("cpu"), report=lambda event: None)
    task = SpeechTask(run, Tokenizer.load(tmp_path / "out"), context)
    (examples,) = task.list_eval_sets()
    options = SearchOptions(beam_size=2)
    texts = task.generate(loaded.model, examples, run, options)
    recordings = [examples.data.get_samples(i) for i in examples.ids]
    assert texts == [loaded.transcribe(np.array(x), options).text for x in recordings]
    assert "(1 recording, beam 2)" in task.score_outputs(texts, examples, run).summary


def test_the_language_is_asked_for_before_recordings_are_decoded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "set.tsv").write_text("missing.wav\ta b\n")
    assert train(tmp_path / "set.tsv", tmp_path / "out", "--from", str(write_whisper(tmp_path / "whisper"))) == 1
    assert "the language of the recordings must be given" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("languages", "flags", "weight"),
    [(["en", None], [], 0.3), (["en", "de"], [], 0.0), (["en", "de"], ["--ctc", "0.2"], 0.2)],
)
def test_translations_have_no_ctc_unless_it_is_asked_for(
    tmp_path: Path, languages: list[str | None], flags: list[str], weight: float
) -> None:
    data, (src, tgt) = write_corpus(tmp_path / "set", (6,)), languages
    steps = ["--steps", "1", "--batch-tokens", "100", "--hold-out", "0", "--src", str(src), *flags, *SMALL]
    assert train(data, tmp_path / "out", *steps, *(["--tgt", tgt] if tgt else [])) == 0
    assert read_run(tmp_path / "out" / "run.toml").train.ctc == weight
    model = load(tmp_path / "out")
    assert isinstance(model, Seq2Seq)
    assert model.config.ctc == (weight > 0)


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--hold-out", "99"], "`data.hold_out` must be less than the 12 recordings there are"),
        (["--rdrop", "1"], "`train.rdrop` has no effect with --task speech"),
        (["--compile"], "`train.compile` must be false for --task speech"),
        (["--ctc", "1.5"], "`ctc` must be at least 0 and less than 1"),
        (["--set", "model.ctc=false", "--ctc", "0.3"], "`train.ctc` must be 0 for a model without a CTC layer"),
        (["--valid", "/nowhere.tsv"], "/nowhere.tsv"),
    ],
)
def test_bad_settings_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: list[str], expected: str
) -> None:
    assert train(write_corpus(tmp_path / "set", (12,)), tmp_path / "out", *flags) == 1
    assert expected in capsys.readouterr().err


def make_recording(name: str) -> Recording:
    return Recording(Path(name), "text", name)


def test_parts_of_corpora_are_joined_by_purpose(monkeypatch: pytest.MonkeyPatch) -> None:
    corpora = {
        "a": {"train": [make_recording("a1")], "test": [make_recording("a2")]},
        "b": {"train": [make_recording("b1")], "valid": [make_recording("b2")], "test": [make_recording("b3")]},
        "c": {"test": [make_recording("c1")]},
    }
    monkeypatch.setattr("attent.data.audio.find_recordings", lambda path, columns: corpora[path])

    def list_names(data: DataConfig) -> dict[str, list[tuple[str, list[str]]]]:
        splits = find_splits(data).items()
        return {split: [(name, [item.location for item in part]) for name, part in parts] for split, parts in splits}

    assert list_names(DataConfig(train=("a", "b"))) == {
        "train": [("a, b", ["a1", "b1"])],
        "valid": [("b", ["b2"])],
        "test": [("a", ["a2"]), ("b", ["b3"])],
    }
    assert list_names(DataConfig(train=("a",), valid=("b", "c"), test=("c", "a"))) == {
        "train": [("a", ["a1"])],
        "valid": [("b, c", ["b2", "c1"])],
        "test": [("c", ["c1"]), ("a", ["a2"])],
    }
    with pytest.raises(TrainError, match="c: must have training recordings, but has only its test part"):
        find_splits(DataConfig(train=("c",)))


def test_transcripts_are_limited_by_the_frames() -> None:
    task, recordings = object.__new__(SpeechTask), make_recordings(3)
    frames = recordings.num_samples[[0, 2]].mean() / HOP_SAMPLES
    examples = SimpleNamespace(data=recordings, ids=np.array([0, 2]))
    assert task.compute_max_tokens(examples) == pytest.approx(MIN_MAX_LENGTH + frames / FRAMES_PER_TOKEN)  # type: ignore[arg-type]


def test_a_batch_beyond_the_epoch_is_refused() -> None:
    batches = make_loader()
    count = batches.num_batches(0)
    for index in (-1, count):
        with pytest.raises(IndexError, match=f"epoch 0 has {count} batches, so there is no batch {index}"):
            batches.get_batch(0, index)


@pytest.mark.parametrize(("frontend", "source"), [(None, "text"), (ImageConfig(image_size=8, patch_size=4), "images")])
def test_speech_models_start_from_speech_models(frontend: ImageConfig | None, source: str) -> None:
    config = SimpleNamespace(frontend=frontend)
    with pytest.raises(TrainError, match=f"x: must be a model of speech for --task speech, but its source is {source}"):
        SpeechTask.adapt_run(RunConfig(task="speech", init_from="x"), {}, config, lambda event: None)
