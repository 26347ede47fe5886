"""Predictions equal those of `transformers`, do not depend on the batch, and errors say what to do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import attent
from attent.decoding.mask_tokens import MaskedText, MaskTokens
from attent.decoding.predictor import Predictor
from attent.text.tokenizer import Tokenizer
from attent.text.vocabulary import SentencePieceVocabulary
from tests.decoding.encoder_models import bert_folder, encoder, sentencepiece, vision_model
from tests.text.imported_tokenizers import sentencepiece_model

TEXTS = ["The [MASK] sat.", "A dog [MASK] in the [MASK], and the bird sang!", "un[MASK]", "[MASK]", "the dog ([MASK])"]


@pytest.fixture(scope="module")
def ours() -> Tokenizer:
    return sentencepiece()


# ---- compared with transformers --------------------------------------------------------------------------------------


def test_masks_are_filled_as_transformers_would(tmp_path: Path) -> None:
    import transformers

    folder = bert_folder(tmp_path / "bert", "MaskedLM")
    reference = transformers.BertForMaskedLM.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    predictor = Predictor.load(folder, device="cpu")
    for text, result in zip(TEXTS, predictor.fill(TEXTS, top_k=3), strict=True):
        row = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            probabilities = reference(**row).logits[0].softmax(-1)
        indices = (row.input_ids[0] == tokenizer.mask_token_id).nonzero()[:, 0].tolist()
        assert len(result.masks) == len(indices)
        for index, predictions in zip(indices, result.masks, strict=True):
            masked_text = probabilities[index, 5:]  # without special tokens
            best = masked_text.topk(3)
            assert [prediction.probability for prediction in predictions] == pytest.approx(
                best.values.tolist(), abs=1e-5
            )
            names = [tokenizer.convert_ids_to_tokens(i + 5) for i in best.indices.tolist()]
            assert [prediction.word for prediction in predictions] == [name.removeprefix("##") for name in names]


def test_texts_are_classified_as_transformers_would(tmp_path: Path) -> None:
    import transformers

    texts = ["the cat sat", "a", "a dog ran in the park , and sang"]
    names = {0: "bad", 1: "good", 2: "odd"}
    folder = bert_folder(tmp_path / "bert", "SequenceClassification", id2label=names)
    reference = transformers.BertForSequenceClassification.from_pretrained(folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    for text, result in zip(texts, Predictor.load(folder, device="cpu").classify(texts), strict=True):
        row = tokenizer(text, return_tensors="pt")
        with torch.no_grad():
            probabilities = reference(**row).logits[0].softmax(-1)
        assert result.probabilities == pytest.approx({names[i]: float(probabilities[i]) for i in names}, abs=1e-5)
        assert result.label == names[int(probabilities.argmax())]


def test_vectors_are_the_mean_or_the_first_of_transformers_states(tmp_path: Path) -> None:
    import transformers

    folder = bert_folder(tmp_path / "bert", "MaskedLM")
    reference = transformers.BertModel.from_pretrained(folder, add_pooling_layer=False).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    predictor = Predictor.load(folder, device="cpu")
    texts = ["the cat sat on the mat .", "a", ""]
    means, firsts = predictor.embed(texts), predictor.embed(texts, pooling="class", normalize=True)
    for text, mean, first in zip(texts, means, firsts, strict=True):
        with torch.no_grad():
            states = reference(**tokenizer(text, return_tensors="pt")).last_hidden_state[0]
        assert torch.allclose(mean, states.mean(0), atol=1e-5)
        assert torch.allclose(first, states[0] / states[0].norm(), atol=1e-5)


# ---- our own models --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("The [MASK] sat.", ["▁The", "<mask>", "▁sat", "."]),
        ("The <mask>.", ["▁The", "<mask>", "."]),
        ("[MASK] sat", ["<mask>", "▁sat"]),
        ("the c[MASK]", ["▁the", "▁c", "<mask>"]),
        ("[MASK][MASK] cat", ["<mask>", "<mask>", "▁cat"]),
    ],
)
def test_a_mask_stands_for_a_word_and_its_space(ours: Tokenizer, text: str, pieces: list[str]) -> None:
    predictor = Predictor(encoder(ours), ours)
    row = predictor._encode_masked_text(predictor.mask_tokens.parse(text), 1)
    assert ours.source.to_pieces(row) == ["<s>", *pieces, "</s>"]


def test_tokens_around_a_mask_are_as_with_a_word_in_its_place(ours: Tokenizer) -> None:
    predictor = Predictor(encoder(ours), ours)
    whole = ours.source.encode(["The cat sat on the mat."])[0]
    row = predictor._encode_masked_text(predictor.mask_tokens.parse("The [MASK] sat on the mat."), 1)
    assert predictor._find_masks(row) == [2]
    assert [*row[1:2], whole[1], *row[3:-1]] == whole


def test_in_a_character_vocabulary_a_mask_is_a_character() -> None:
    letters = sentencepiece("char")
    predictor = Predictor(encoder(letters), letters)
    row = predictor._encode_masked_text(predictor.mask_tokens.parse("a c[MASK]t"), 1)
    assert letters.source.to_pieces(row) == ["<s>", "▁", "a", "▁", "c", "<mask>", "t", "</s>"]


@pytest.mark.parametrize(
    ("piece", "text", "filled"),
    [
        ("▁cat", "The [MASK] sat", "The cat sat"),
        ("▁cat", "[MASK] sat", "cat sat"),
        (".", "The dog [MASK]", "The dog."),
        ("▁cat", "The c[MASK]", "The c cat"),
    ],
)
def test_words_are_inserted_as_they_decode(ours: Tokenizer, piece: str, text: str, filled: str) -> None:
    predictor = Predictor(encoder(ours), ours)
    token = next(i for i in range(ours.source.size) if ours.source.to_pieces([i]) == [piece])
    masked_text = predictor.mask_tokens.parse(text)
    assert masked_text.fill_masks([predictor._make_word(token)]) == filled
    row = predictor._encode_masked_text(masked_text, 1)
    assert ours.source.decode([token if i == ours.source.mask else i for i in row]) == filled


def test_special_tokens_are_never_predicted(ours: Tokenizer) -> None:
    model = encoder(ours)
    assert model.masked_lm is not None
    assert model.masked_lm.output.bias is not None
    with torch.no_grad():
        model.masked_lm.output.bias[[*range(5), ours.source.mask]] = 100.0
    result = Predictor(model, ours).fill(["The [MASK]"], top_k=4)[0]
    assert not {prediction.word for prediction in result.masks[0]} & {"<s>", "</s>", "<mask>", "<pad>", "<unk>"}
    assert all(prediction.probability < 1e-6 for prediction in result.masks[0])  # special tokens have the rest


def test_predictions_do_not_depend_on_the_batch(ours: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(encoder(ours, labels=("good", "bad")), ours)
    texts = ["The cat sat.", "A", "A dog ran in the park, and the bird sang.", "", "the mat"]
    masked = ["The [MASK] sat.", "[MASK]", "A dog [MASK] in the [MASK] and sang"]
    labels, vectors, filled = predictor.classify(texts), predictor.embed(texts), predictor.fill(masked)
    assert torch.allclose(predictor.embed(texts[::-1]), vectors.flip(0), atol=1e-5)
    monkeypatch.setattr("attent.decoding.predictor.CPU_BATCH_TOKENS", 1)  # each text alone
    for single, batched in zip(predictor.classify(texts), labels, strict=True):
        assert single.probabilities == pytest.approx(batched.probabilities, abs=1e-5)
    assert torch.allclose(predictor.embed(texts), vectors, atol=1e-5)
    for single_text, batched_text in zip(predictor.fill(masked), filled, strict=True):
        assert [[prediction.word for prediction in mask] for mask in single_text.masks] == [
            [prediction.word for prediction in mask] for mask in batched_text.masks
        ]


def test_long_texts_are_truncated_with_one_message(ours: Tokenizer) -> None:
    messages: list[str] = []
    predictor = Predictor(encoder(ours, labels=("good", "bad")), ours, notify=messages.append)
    long = "The cat sat on the mat. " * 20
    assert len(predictor.classify([long, "A cat"])) == 2
    assert len(predictor.classify([long, "A cat"])) == 2
    assert predictor.embed([long]).shape == (1, 16)
    assert messages[0] == "truncated 1 of 2 texts to the model's 32 positions"
    assert len(messages) == 2
    predictor.fill(["A [MASK] ran. " + long])
    with pytest.raises(ValueError, match="text 2 must have its masks among the first 32 tokens"):
        predictor.fill(["A [MASK]", long + "[MASK]"])


# ---- images ----------------------------------------------------------------------------------------------------------


def test_images_are_classified_from_files_and_tensors(tmp_path: Path) -> None:
    image = pytest.importorskip("PIL.Image")
    model = vision_model()
    model.save(tmp_path / "vision")
    predictor = attent.Predictor.load(tmp_path / "vision", device="cpu")
    pixels = torch.randint(0, 256, (3, 3, 8, 8), dtype=torch.uint8)
    for number, picture in enumerate(pixels):
        image.fromarray(picture.permute(1, 2, 0).numpy()).save(tmp_path / f"{number}.png")
    results = predictor.classify([str(tmp_path / "0.png"), tmp_path / "1.png", pixels[2]])
    probabilities = model(model.normalize(pixels)).softmax(-1)
    for result, row in zip(results, probabilities.tolist(), strict=True):
        assert result.probabilities == pytest.approx(dict(zip(("cat", "dog", "bird"), row, strict=True)), abs=1e-5)
    vectors = predictor.embed([pixels[0]], pooling="class")
    assert torch.allclose(vectors, model.compute_states(model.normalize(pixels[:1]))[:, 0], atol=1e-5)
    with pytest.raises(ValueError, match="an image must be a path"):
        predictor.classify([pixels[0].float()])


# ---- errors ----------------------------------------------------------------------------------------------------------


def test_a_model_without_the_head_says_how_to_get_one(ours: Tokenizer) -> None:
    bare = Predictor(encoder(ours, masked=False), ours, name="runs/bare")
    with pytest.raises(ValueError, match=r"runs/bare: must be a masked language model.*--task mlm"):
        bare.fill(["The [MASK]"])
    with pytest.raises(ValueError, match=r"runs/bare: must be a classifier.*--task classify"):
        bare.classify(["The cat"])
    with pytest.raises(ValueError, match="must be a masked language model"):
        Predictor(vision_model(), None).fill(["The [MASK]"])


def test_invalid_inputs_raise_an_error(ours: Tokenizer) -> None:
    predictor = Predictor(encoder(ours, labels=("a", "b")), ours)
    with pytest.raises(ValueError, match="text 2 must have a mask"):
        predictor.fill(["The [MASK]", "The cat"])
    with pytest.raises(ValueError, match="item 1 must be a text, but is of type PosixPath"):
        predictor.classify([Path("x.png")])
    with pytest.raises(ValueError, match="`top_k` must be 1 or more"):
        predictor.fill(["The [MASK]"], top_k=0)
    with pytest.raises(ValueError, match="`pooling` must be mean or class"):
        predictor.embed(["a"], pooling="max")  # type: ignore[arg-type]
    assert MaskedText(("a",)).fill_masks([]) == "a"


# ---- spans -----------------------------------------------------------------------------------------------------------


SENTINELS = ("<extra_id_0>", "<extra_id_1>", "<extra_id_2>")


@pytest.fixture(scope="module")
def span_tokenizer() -> Tokenizer:
    return sentencepiece(controls=SENTINELS)


def test_sentinels_are_read_as_in_training(span_tokenizer: Tokenizer) -> None:
    """Removing a span removes its space too."""
    vocabulary = span_tokenizer.source
    masks = MaskTokens(vocabulary)
    whole = vocabulary.encode(["The cat sat on the mat."])[0]
    index = vocabulary.to_pieces(whole).index("▁cat")
    assert masks.encode(masks.parse("The <extra_id_2> sat on the mat.")) == [
        *whole[:index], vocabulary.sentinels[2], *whole[index + 1 :]
    ]  # fmt: skip
    ids = masks.encode(masks.parse("The [MASK] <extra_id_0> [MASK]"))
    assert ids[1:] == [vocabulary.sentinels[i] for i in (1, 0, 2)]
    with pytest.raises(ValueError, match=r"must have at most 3 masks.*but has 4"):
        masks.parse("[MASK]" * 4)


def test_unknown_characters_are_not_masks() -> None:
    """A vocabulary may have one piece for everything unknown."""
    vocabulary = SentencePieceVocabulary(sentencepiece_model(), extra_ids=2)
    ids = MaskTokens(vocabulary).encode(MaskTokens(vocabulary).parse("☃ <extra_id_0> ☃"))
    assert ids.count(vocabulary.sentinels[0]) == 1
    assert ids.count(vocabulary.unknown) == 2


# ---- whitespace ------------------------------------------------------------------------------------------------------


def test_whitespace_around_a_text_changes_nothing(ours: Tokenizer) -> None:
    predictor = Predictor(encoder(ours, labels=("good", "bad")), ours)
    padded, plain = "  The cat [MASK]\t", "The cat [MASK]"
    assert torch.equal(predictor.embed([padded]), predictor.embed([plain]))
    assert predictor.classify([padded]) == predictor.classify([plain])
    assert predictor.fill([padded])[0].masks == predictor.fill([plain])[0].masks


def test_a_single_string_raises_an_error(ours: Tokenizer) -> None:
    predictor = Predictor(encoder(ours, labels=("bad", "good")), ours)
    for method in (predictor.classify, predictor.embed):
        with pytest.raises(ValueError, match=r"must be a list of texts or images.*put it in \[ \]"):
            method("my lord")


def test_devices_are_chosen_as_for_translators(tmp_path: Path) -> None:
    folder = bert_folder(tmp_path / "bert", "MaskedLM")
    assert Predictor.load(folder, device="auto").device == Predictor.load(folder).device
    with pytest.raises(ValueError, match="device cuda:99: cannot be used here"):
        Predictor.load(folder, device="cuda:99")
