"""Documents of speech and caption models: sources, weights, search, figures, errors."""

from __future__ import annotations

import base64
import io
import json
import re
import wave
from pathlib import Path

import numpy as np
import pytest
import torch

import attent
from attent.data.audio import read_audio
from attent.decoding.options import SearchOptions
from attent.decoding.source_search import compute_audio_frames, search_sources
from attent.decoding.transcriber import Transcriber
from attent.inspection.inspectors import base, front_ends
from attent.inspection.inspectors.base import InspectionRequest
from attent.inspection.inspectors.front_ends import CaptioningInspector, SpeechInspector
from attent.inspection.inspectors.seq2seq import Seq2SeqInspector, TranslationInspector
from attent.inspection.session import open_inspector
from attent.models.seq2seq import find_suppressed_tokens
from attent.nn import AudioConfig, ImageConfig
from attent.nn.frontends import normalize_pixels
from attent.text.tokenizer import Tokenizer
from tests.inspection import models, toy_translator
from tests.inspection.documents import read_weights
from tests.inspection.models import ring, write_chirp, write_ring
from tests.text import corpus

pytest.importorskip("soundfile")
pytest.importorskip("PIL")
TARGET = "A dog waiting."


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("inputs")
    return {"speech": str(write_chirp(folder)), "caption": str(write_ring(folder))}


def make_inspector(kind: str) -> Seq2SeqInspector:
    if kind == "speech":
        return SpeechInspector(Transcriber(models.speech(), models.tokenizer()))
    return CaptioningInspector(models.captioner(), models.tokenizer())


def make_source(kind: str, path: str) -> tuple[torch.Tensor, torch.Tensor | None]:
    config = (models.speech() if kind == "speech" else models.captioner()).config.frontend
    if isinstance(config, AudioConfig):
        return compute_audio_frames([torch.from_numpy(read_audio(path))], config, torch.device("cpu"))
    assert isinstance(config, ImageConfig)
    return normalize_pixels(ring()[None], config, torch.zeros(1)), None


@pytest.mark.parametrize("kind", ["speech", "caption"])
def test_search_and_weights_are_those_of_the_model(kind: str, files: dict[str, str]) -> None:
    inspector, options = make_inspector(kind), SearchOptions(beam_size=3, max_length=9)
    document = inspector.inspect(InspectionRequest(text=files[kind], search=options))
    source, lengths = make_source(kind, files[kind])
    (best,) = search_sources(inspector.model, inspector.tokenizer, source, lengths, options)
    result = document["decoding"]["results"][0]
    assert (result["text"].strip(), result["score"]) == (best.text, pytest.approx(best.score, rel=1e-4))
    assert len(document["decoding"]["results"]) == 3
    ids = [*best.token_ids, *([inspector.model.config.end_id] if best.is_finished else [])]
    assert [choice["chosen"] for choice in document["decoding"]["choices"]] == ids
    with attent.record(inspector.model) as trace, torch.no_grad():
        inspector.model(source, torch.tensor([[inspector.model.config.start_id, *ids[:-1]]]), lengths)
    back = read_weights(document)
    assert list(back) == list(trace)
    for path, calls in trace.items():
        torch.testing.assert_close(back[path], calls[0], atol=1e-5, rtol=0)
    assert (document["sides"]["source"].get("audio") is not None) == (kind == "speech")
    assert all("q" in layer for layer in document["layers"])
    json.dumps(document, allow_nan=False)


def test_language_tag_is_a_prompt(files: dict[str, str]) -> None:
    """It is read by the decoder and shown as forced, but has no share in scores and text."""
    tokenizer = corpus.tokenizer()
    model = models.make_front_end_model(
        ImageConfig(image_size=28, patch_size=7, channels=1), attent.nn.LearnedConfig(max_length=17), tokenizer
    )
    inspector, options = CaptioningInspector(model, tokenizer), SearchOptions(beam_size=2, max_length=7)
    document = inspector.inspect(InspectionRequest(text=files["caption"], to="de", search=options))
    tag = tokenizer.target.get_tag_id("de")
    (best,) = search_sources(model, tokenizer, make_source("caption", "")[0], None, options, prefix_ids=[tag])
    decoding = document["decoding"]
    assert decoding["forced"] == 1
    assert decoding["results"][0]["score"] == pytest.approx(best.score, rel=1e-4)
    assert decoding["results"][0]["text"] == document["sides"]["target"]["text"]
    assert [choice["chosen"] for choice in decoding["choices"][: 1 + len(best.token_ids)]] == [tag, *best.token_ids]
    path = {node["step"]: node["token"] for node in decoding["nodes"] if node["on_best_path"]}
    assert [path[step] for step in range(1 + len(best.token_ids))] == [tag, *best.token_ids]
    assert document["sides"]["target"]["tokens"][0]["special"] == "tag"
    given = inspector.inspect(InspectionRequest(text=files["caption"], to="de", target="Ein Hund"))["decoding"]
    assert given["results"][0]["text"] == "Ein Hund"
    assert given["results"][0]["log_prob"] is not None
    with pytest.raises(ValueError, match="several target languages"):
        inspector.inspect(InspectionRequest(text=files["caption"]))


def test_a_model_whose_start_end_and_padding_are_one_token_is_inspected(files: dict[str, str]) -> None:
    """As in GPT-2's tokenizer: no token is suppressed."""
    tokenizers = pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.BPE({"</s>": 0, "a": 1, "b": 2, "ab": 3}, [("a", "b")]))
    config = b'{"eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}'
    tokenizer = Tokenizer.from_files({"tokenizer.json": words.to_str().encode(), "tokenizer_config.json": config})
    model = models.make_front_end_model(
        ImageConfig(image_size=28, patch_size=7, channels=1), attent.nn.LearnedConfig(max_length=17), tokenizer
    )
    assert find_suppressed_tokens(model.config, tokenizer) == []
    inspector, options = CaptioningInspector(model, tokenizer), SearchOptions(beam_size=2, max_length=5)
    document = inspector.inspect(InspectionRequest(text=files["caption"], search=options))
    assert document["decoding"]["choices"]


def test_whisper_is_searched_as_when_transcribing(files: dict[str, str], tmp_path: Path) -> None:
    """With its prompt, the tokens that it suppresses and its rules; the language is detected or given."""
    pytest.importorskip("transformers")
    from tests.interop.test_whisper import make_searchable

    make_searchable(0, tmp_path)
    inspector = open_inspector(tmp_path)
    assert isinstance(inspector, SpeechInspector)
    options = SearchOptions(beam_size=1, max_length=8)
    document = inspector.inspect(InspectionRequest(text=files["speech"], search=options))
    transcriber = Transcriber.load(tmp_path, device="cpu")
    samples, _ = front_ends.read_beginning(files["speech"], transcriber.max_seconds)
    source, lengths = compute_audio_frames([samples], transcriber.config, transcriber.device)
    prefix_ids = transcriber.get_prefix(transcriber.detect_language(samples.numpy()))
    (best,) = transcriber.search(source, lengths, prefix_ids, options)
    forced = document["decoding"]["forced"]
    chosen = [choice["chosen"] for choice in document["decoding"]["choices"]]
    assert tuple(chosen[:forced]) == prefix_ids
    assert tuple(chosen[forced : forced + len(best.token_ids)]) == best.token_ids
    suppressed = {*transcriber.suppressed_tokens, transcriber.tokenizer.target.start}
    options_shown = [option for choice in document["decoding"]["choices"] for option in choice["options"]]
    assert suppressed
    assert not suppressed & {option["token"] for option in options_shown}
    for tag in inspector.tokenizer.target.tags[:2]:
        inspected = inspector.inspect(InspectionRequest(text=files["speech"], to=tag, target="a dog"))
        assert inspected["decoding"]["choices"][0]["chosen"] == inspector.tokenizer.target.get_tag_id(tag)
        assert inspected["decoding"]["forced"] == 3
        assert inspected["sides"]["target"]["text"].strip() == "a dog"


def test_recording_is_embedded_with_its_spectrogram(files: dict[str, str]) -> None:
    from PIL import Image

    side = make_inspector("speech").inspect(InspectionRequest(text=files["speech"], target=TARGET))["sides"]["source"]
    with wave.open(io.BytesIO(base64.b64decode(side["audio"]["src"].partition(",")[2]))) as embedded:
        assert (embedded.getnchannels(), embedded.getsampwidth(), embedded.getframerate()) == (1, 2, 16_000)
        samples = np.frombuffer(embedded.readframes(embedded.getnframes()), "<i2")
    np.testing.assert_allclose(samples / 32767, read_audio(files["speech"]), atol=1e-4)
    assert (side["audio"]["seconds"], side["audio"]["step"], side["text"]) == (1.2, 0.02, "chirp.wav (1.2 s)")
    assert (len(side["tokens"]), side["image"]["rows"], side["image"]["columns"]) == (60, 1, 60)
    assert [token["text"] for token in side["tokens"][:2]] == ["0.00\xa0s", "0.02\xa0s"]
    image = Image.open(io.BytesIO(base64.b64decode(side["image"]["src"].partition(",")[2])))
    assert image.size == (120, 20)
    loudest = np.asarray(image).argmax(0)
    assert loudest[100] < loudest[10]  # the tone rises, and low frequencies are at the bottom


def test_long_recordings_are_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_chirp(tmp_path, 2.0)
    monkeypatch.setattr(front_ends, "MAX_SECONDS", 1.5)
    side = make_inspector("speech").inspect(InspectionRequest(text=str(path), target=TARGET))["sides"]["source"]
    assert (side["text"], len(side["tokens"])) == ("chirp.wav (only the first 1.5 s)", 75)


def test_padding_to_fixed_frames_is_not_shown(files: dict[str, str]) -> None:
    """The weights on the padding are left out, and with them queries and keys, whose softmax would be another."""
    inspector = SpeechInspector(Transcriber(models.speech(fixed_frames=200), models.tokenizer()))
    document = inspector.inspect(InspectionRequest(text=files["speech"], target=TARGET))
    shapes = {layer["path"]: layer["weights"]["shape"] for layer in document["layers"]}
    assert shapes["encoder.blocks.0.self_attn"] == [4, 60, 60]
    cross = read_weights(document)["decoder.blocks.0.cross_attn"]
    assert 0 < float(cross.sum(-1).min()) < 0.99
    assert {layer["path"] for layer in document["layers"] if "q" in layer} == {
        f"decoder.blocks.{i}.self_attn" for i in range(2)
    }
    long = inspector.inspect(InspectionRequest(text=str(write_chirp(Path(files["speech"]).parent, 2.5)), target=TARGET))
    assert long["sides"]["source"]["text"].endswith("(only the first 2 s)")
    write_chirp(Path(files["speech"]).parent)


def test_small_layers_stay_dense(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the encoder has too many weights, the words keep theirs."""
    monkeypatch.setattr(base, "MAX_IMAGE_WEIGHTS", 8_000)
    monkeypatch.setattr(base, "MAX_SPARSE_WEIGHTS", 4_800)
    document = make_inspector("speech").inspect(InspectionRequest(text=files["speech"], target=TARGET))
    assert {layer["stack"] for layer in document["layers"] if "weights" in layer} == {"decoder"}
    sparse = [layer["sparse"]["weights"]["shape"] for layer in document["layers"] if "sparse" in layer]
    assert sparse == [[4, 60, 10]] * 2  # 480 rows


def test_heads_are_described(files: dict[str, str]) -> None:
    for kind in ("speech", "caption"):
        stats = make_inspector(kind).inspect(InspectionRequest(text=files[kind], target=TARGET))["head_stats"]
        assert stats["dataset"] == "this input"
        own = {
            stack: [
                head["description"]
                for head in stats["heads"]
                if head["path"].endswith("self_attn") and stack in head["path"]
            ]
            for stack in ("encoder", "decoder")
        }
        assert all(own.values())
        assert not any("input token" in description for description in own["encoder"])


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("speech", "A man rides a bike.", "A man rides a bike.: must be a recording, but does not exist"),
        ("caption", "A man rides a bike.", "A man rides a bike.: must be an image"),
        ("speech", "nowhere.wav", "nowhere.wav: must be a recording, but does not exist"),
        ("speech", __file__, "must be a recording"),
        ("caption", "nowhere.png", "nowhere.png: must be an image"),
    ],
)
def test_wrong_inputs_are_rejected(kind: str, text: str, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        make_inspector(kind).inspect(InspectionRequest(text=text))


def test_translator_takes_no_file(files: dict[str, str]) -> None:
    inspector = TranslationInspector(toy_translator.translator())
    for path in files.values():
        with pytest.raises(ValueError, match="this is a translator, which takes a sentence, not a file"):
            inspector.inspect(InspectionRequest(text=path))
    assert inspector.inspect(InspectionRequest(text="nowhere.wav"))["title"] == "nowhere.wav"
