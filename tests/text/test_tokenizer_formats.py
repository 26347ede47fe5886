"""Imported tokenizers: the same ids and texts as in `transformers`, and clear errors for damaged files."""

from __future__ import annotations

import copy
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
from sentencepiece import SentencePieceProcessor

from attent.text.tokenizer import Tokenizer, TokenizerError
from attent.text.tokenizer_formats import WhisperVocabulary, build_prompt
from tests.text.corpus import lines, tokenizer
from tests.text.imported_tokenizers import TAGS, marian_folder, sentencepiece_model, whisper_folder, write_json

T5_IDS = (0, -1, 1, 2)
SENTENCES = [
    *lines()[0][:100],
    *lines()[1][:100],
    "Unknown: 汉字 😀 ž Ω!",
    "ﬁne  ligatures ② and   spaces ",
    "",
    "word",
    "Straße ß",
]


def error_message(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Tokenizer.load(folder)
    return str(caught.value)


# --- Marian ----------------------------------------------------------------------------------------------------------


@pytest.fixture(params=[False, True], ids=["joint", "separate"])
def marian(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Any, Tokenizer]:
    transformers = pytest.importorskip("transformers")
    folder = marian_folder(tmp_path, separate=request.param)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about sacremoses, which is not used here
        theirs = transformers.MarianTokenizer.from_pretrained(folder)
    return theirs, Tokenizer.load(folder)


def test_marian_encodes_as_transformers_does(marian: tuple[Any, Tokenizer]) -> None:
    theirs, ours = marian
    assert ours.encode_source(SENTENCES) == theirs(SENTENCES)["input_ids"]
    assert ours.encode_target(SENTENCES) == theirs(text_target=SENTENCES)["input_ids"]


def test_marian_decodes_as_transformers_does(marian: tuple[Any, Tokenizer]) -> None:
    theirs, ours = marian
    rows = ours.encode_target(SENTENCES)
    assert [ours.target.decode(ids) for ids in rows] == theirs.batch_decode(rows, skip_special_tokens=True)
    assert ours.target.decode(rows[150]) == SENTENCES[150]
    assert ours.target.to_pieces(rows[150]) == theirs.convert_ids_to_tokens(rows[150])


def test_marian_has_its_own_special_ids(tmp_path: Path) -> None:
    ours = Tokenizer.load(marian_folder(tmp_path))
    size = ours.target.size
    assert (ours.target.end, ours.target.unknown, ours.target.pad, ours.target.start) == (0, 1, size - 1, size - 1)
    assert not ours.joint  # shared ids, but a separate model for each side


def test_marian_tags_are_arguments_and_not_read_from_the_text(tmp_path: Path) -> None:
    ours = Tokenizer.load(marian_folder(tmp_path, tags=TAGS))
    assert ours.source.tags == ("deu", "por_BR")
    (plain,), (tagged,) = ours.encode_source(["A man."]), ours.encode_source(["A man."], target_language="deu")
    assert tagged == [ours.source.get_tag_id("deu"), *plain]
    assert ours.source.get_tag_id("deu") not in ours.encode_source([">>deu<< A man."])[0]
    assert ours.source.decode(tagged) == "A man."
    with pytest.raises(ValueError, match="no tag for 'fra'; its languages are deu, por_BR"):
        ours.encode_source(["A man."], target_language="fra")


def test_a_marian_tag_is_the_id_that_transformers_gives_it(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = marian_folder(tmp_path, tags=TAGS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.MarianTokenizer.from_pretrained(folder)
    assert (
        Tokenizer.load(folder).encode_source(["A man."], target_language="deu")
        == theirs([">>deu<< A man."])["input_ids"]
    )


def test_a_marian_tokenizer_round_trips(tmp_path: Path) -> None:
    first = Tokenizer.load(marian_folder(tmp_path / "theirs", separate=True))
    first.save(tmp_path / "ours")
    assert Tokenizer.load(tmp_path / "ours") == first
    assert copy.deepcopy(first) == first


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda ids: {}, "must have </s>"),
        (lambda ids: {name: i for name, i in ids.items() if name != "<pad>"}, "must have <pad>"),
        (lambda ids: ids | {"extra": 3}, "number its pieces from 0"),
        (lambda ids: ids | {"extra": "3"}, "number its pieces from 0"),
        (lambda ids: ids | {"extra": 10**12}, "number its pieces from 0"),
        (lambda ids: list(ids), "must be an object"),
    ],
)
def test_a_damaged_vocabulary_is_refused(tmp_path: Path, change: Any, words: str) -> None:
    folder = marian_folder(tmp_path)
    ids = json.loads((folder / "vocab.json").read_text(encoding="utf-8"))
    write_json(folder / "vocab.json", change(ids))
    assert words in error_message(folder)
    assert error_message(folder).startswith(f"{folder}/vocab.json: ")


def test_missing_files_of_a_marian_folder_are_named(tmp_path: Path) -> None:
    folder = marian_folder(tmp_path)
    (folder / "vocab.json").write_bytes(b'{"a": 0')
    assert "is not valid JSON" in error_message(folder)
    (folder / "vocab.json").unlink()
    assert error_message(folder) == f"{folder}/vocab.json: is missing; source.spm needs it"
    marian_folder(tmp_path)
    (folder / "target.spm").write_bytes(b"?")
    assert error_message(folder).startswith(f"{folder}/target.spm: is not a SentencePiece model")


# --- SentencePiece files ---------------------------------------------------------------------------------------------


def t5_folder(folder: Path, extra: Any = 10) -> Path:
    (folder / "spiece.model").write_bytes(sentencepiece_model(ids=T5_IDS))
    write_json(folder / "tokenizer_config.json", {"extra_ids": extra})
    return folder


def test_t5_encodes_and_decodes_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(t5_folder(tmp_path))
    processor = SentencePieceProcessor(model_proto=sentencepiece_model(ids=T5_IDS))
    scores = [(processor.id_to_piece(i), processor.get_score(i)) for i in range(len(processor))]
    scores += [(f"<extra_id_{i}>", 0.0) for i in range(9, -1, -1)]
    theirs = transformers.T5Tokenizer(vocab=scores, extra_ids=10)
    # Unicode normalisation is in the .model file only, which transformers needs protobuf to read.
    plain = [text for text in SENTENCES if not set("ﬁ②") & set(text)]
    rows = ours.encode_source(plain)
    assert rows == theirs(plain)["input_ids"]
    assert [ours.source.decode(ids) for ids in rows] == theirs.batch_decode(rows, skip_special_tokens=True)
    assert (ours.target.pad, ours.target.end, ours.target.unknown, ours.target.start) == (0, 1, 2, 0)
    assert ours.source.size == len(theirs)


def test_t5_sentinels_are_not_decoded_to_text(tmp_path: Path) -> None:
    ours = Tokenizer.load(t5_folder(tmp_path)).target
    assert ours.to_pieces([ours.size - 1, ours.size - 10]) == ["<extra_id_0>", "<extra_id_9>"]
    assert ours.decode([ours.size - 1, *ours.encode(["man"])[0], ours.size - 10]) == "man"


@pytest.mark.parametrize("extra", [-1, "ten", 10**9, True])
def test_an_impossible_number_of_sentinels_is_refused(tmp_path: Path, extra: Any) -> None:
    assert "`extra_ids` must be a number up to 10000" in error_message(t5_folder(tmp_path, extra))


def test_another_sentencepiece_file_encodes_as_sentencepiece_does(tmp_path: Path) -> None:
    model = sentencepiece_model(model_type="bpe")
    (tmp_path / "tokenizer.model").write_bytes(model)
    ours, theirs = Tokenizer.load(tmp_path), SentencePieceProcessor(model_proto=model)
    assert ours.source.encode(SENTENCES) == theirs.encode(SENTENCES)
    assert ours.source.encode(["▁ \x1a"]) == theirs.encode(["▁ \x1a"])  # our escapes are used by our models only
    assert (ours.source.start, ours.source.end, ours.source.unknown, ours.source.pad) == (1, 2, 0, 2)


def test_a_foreign_model_with_the_escape_piece_stays_foreign(tmp_path: Path) -> None:
    """U+001A is a piece of our own models, but does not make a model ours: the format file does."""
    model = sentencepiece_model(model_type="bpe", user_defined_symbols=("\x1a",))
    (tmp_path / "tokenizer.model").write_bytes(model)
    loaded, theirs = Tokenizer.load(tmp_path), SentencePieceProcessor(model_proto=model)
    again = Tokenizer.from_files(loaded.files)
    for ours in (loaded, again, copy.deepcopy(loaded)):
        assert not ours.is_own
        assert ours.source.encode(["a ▁ \x1a"]) == theirs.encode(["a ▁ \x1a"])
        assert ours.source.suffix_ids == ()


def test_a_model_without_an_end_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(ids=(-1, -1, -1, 0)))
    assert "has no end-of-sentence piece" in error_message(tmp_path)


# --- tokenizer.json --------------------------------------------------------------------------------------------------

SPECIALS = {"unk_token": "<unk>", "eos_token": "</s>", "pad_token": {"content": "<pad>"}, "bos_token": "<s>"}


def fast_folder(folder: Path, config: dict[str, Any] | None = SPECIALS) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    tokenizer.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=200, special_tokens=["<unk>", "</s>", "<pad>", "<s>"], show_progress=False
    )
    tokenizer.train_from_iterator(lines()[0], trainer)
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 3), ("</s>", 1)]
    )
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding()
    tokenizer.save(str(folder / "tokenizer.json"))
    if config is not None:
        write_json(folder / "tokenizer_config.json", config)
    return folder


def test_tokenizer_json_encodes_and_decodes_as_transformers_does(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = Tokenizer.load(fast_folder(tmp_path))
    theirs = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"), eos_token="</s>", pad_token="<pad>"
    )
    rows = ours.source.encode(SENTENCES)
    assert rows == theirs(SENTENCES, add_special_tokens=False, truncation=False, padding=False)["input_ids"]
    assert [ours.source.decode(ids) for ids in rows] == theirs.batch_decode(rows, skip_special_tokens=True)
    assert ours.source.to_pieces(rows[0]) == theirs.convert_ids_to_tokens(rows[0])


@pytest.mark.parametrize("config", [SPECIALS, None, {}], ids=["set", "no file", "empty"])
def test_the_special_pieces_of_tokenizer_json_are_found(tmp_path: Path, config: dict[str, Any] | None) -> None:
    ours = Tokenizer.load(fast_folder(tmp_path, config)).source
    assert (ours.unknown, ours.end, ours.pad, ours.start) == (0, 1, 2, 3)


def test_special_tokens_in_a_text_are_plain_text_to_tokenizer_json(tmp_path: Path) -> None:
    ours = Tokenizer.load(fast_folder(tmp_path))
    assert ours.encode_source(["a </s> b"])[0].count(ours.source.end) == 1


def test_tokenizer_json_can_be_saved_and_copied(tmp_path: Path) -> None:
    first = Tokenizer.load(fast_folder(tmp_path))
    first.save(tmp_path / "copy")
    assert Tokenizer.load(tmp_path / "copy").encode_source(SENTENCES) == first.encode_source(SENTENCES)
    assert copy.deepcopy(first) == first
    assert first.joint
    with pytest.raises(TokenizerError, match="ids must be from 0"):
        first.target.decode([10**6])
    with pytest.raises(TokenizerError, match="no tag for 'de'"):
        first.encode_source(["A man."], target_language="de")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not valid JSON"),
        (b"[]", "must be an object"),
        (b"{}", "cannot read it"),
        (b'{"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 5}, "merges": [["a", "b"]]}}', "cannot read it"),
        (
            b'{"version": "1.0", "model": {"type": "WordLevel", "vocab": {}, "unk_token": "x"}}',
            "no end-of-sentence token",
        ),
        (b"[" * 100_000, "deep"),
    ],
)
def test_a_damaged_tokenizer_json_is_refused(tmp_path: Path, content: bytes, words: str) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "tokenizer.json").write_bytes(content)
    assert words in error_message(tmp_path)
    assert error_message(tmp_path).startswith(f"{tmp_path}/tokenizer.json: ")


def test_a_missing_package_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fast_folder(tmp_path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert error_message(tmp_path).endswith("run pip install 'attent[hf]'")


def test_special_tokens_around_a_text_are_those_of_transformers(tmp_path: Path) -> None:
    ours = Tokenizer.load(fast_folder(tmp_path)).source
    assert (ours.prefix_ids, ours.suffix_ids, ours.mask, ours.sentinels) == ((3,), (1,), None, ())


def test_mask_and_sentinel_tokens_are_read_from_either_file(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    names = ["<pad>", "</s>", "<unk>", "gap", "word", "<extra_id_1>", "<extra_id_0>", "<extra_id_10>"]
    model = tokenizers.models.WordLevel({name: i for i, name in enumerate(names)}, unk_token="<unk>")
    imported = tokenizers.Tokenizer(model)
    imported.add_special_tokens(names[5:])
    imported.save(str(tmp_path / "tokenizer.json"))
    write_json(tmp_path / "special_tokens_map.json", {"mask_token": {"content": "gap"}})
    ours = Tokenizer.load(tmp_path).source
    assert (ours.mask, ours.sentinels, ours.prefix_ids, ours.suffix_ids) == (3, (6, 5, 7), (), ())
    assert Tokenizer.from_files(Tokenizer.load(tmp_path).files).source.mask == 3


# --- GPT-2 and BERT ---------------------------------------------------------------------------------------------------

MIXED = [
    *SENTENCES,
    "Don't  STOP, Ångström naïve 汉字!",
    "a\nb\tc <|endoftext|> d",
    "[CLS] x [MASK]",
    "e\u0301 İ",
    "12,345.6%",
]


def gpt2_folder(folder: Path) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    imported = tokenizers.ByteLevelBPETokenizer()
    imported.train_from_iterator(lines()[0], vocab_size=400, special_tokens=["<|endoftext|>"], show_progress=False)
    imported.save_model(str(folder))
    return folder


@pytest.mark.parametrize("prefix", [False, True])
def test_gpt2_tokenizers_encode_and_decode_as_transformers_does(tmp_path: Path, prefix: bool) -> None:
    transformers = pytest.importorskip("transformers")
    gpt2_folder(tmp_path)
    vocab, merges = (str(tmp_path / name) for name in ("vocab.json", "merges.txt"))
    theirs = transformers.GPT2Tokenizer(vocab=vocab, merges=merges, add_prefix_space=prefix)
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path)
    plain = [text for text in MIXED if "<|" not in text]
    rows = ours.source.encode(plain)
    assert rows == theirs(plain)["input_ids"]
    assert [ours.source.decode(ids) for ids in rows] == theirs.batch_decode(rows, clean_up_tokenization_spaces=False)
    assert ours.joint
    assert (ours.source.start, ours.source.end, ours.source.prefix_ids, ours.source.suffix_ids) == (0, 0, (), ())
    assert 0 not in ours.source.encode(["a <|endoftext|>"])[0]
    assert ours.source.decode([0, *rows[0], 0]) == ours.source.decode(rows[0])
    assert ours.source.size == len(theirs)


def bert_folder(folder: Path, lower: bool = True) -> Path:
    tokenizers = pytest.importorskip("tokenizers")
    imported = tokenizers.BertWordPieceTokenizer(lowercase=lower)
    imported.train_from_iterator([*lines()[0], *MIXED], vocab_size=300, show_progress=False)
    imported.save_model(str(folder))
    return folder


@pytest.mark.parametrize(
    "tokenizer_config", [{}, {"do_lower_case": False}, {"do_lower_case": True, "strip_accents": False}]
)
def test_bert_tokenizers_encode_and_decode_as_transformers_does(
    tmp_path: Path, tokenizer_config: dict[str, Any]
) -> None:
    transformers = pytest.importorskip("transformers")
    bert_folder(tmp_path, tokenizer_config.get("do_lower_case", True))
    theirs = transformers.BertTokenizer(vocab=str(tmp_path / "vocab.txt"), **tokenizer_config)
    theirs.save_pretrained(tmp_path)
    ours = Tokenizer.load(tmp_path).source
    plain = [text for text in MIXED if "[" not in text]
    rows = [[*ours.prefix_ids, *row, *ours.suffix_ids] for row in ours.encode(plain)]
    assert rows == theirs(plain)["input_ids"]
    assert [ours.decode(ids) for ids in rows] == theirs.batch_decode(
        rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    specials = (ours.pad, ours.unknown, ours.start, ours.end, ours.mask)
    assert specials == (
        theirs.pad_token_id,
        theirs.unk_token_id,
        theirs.cls_token_id,
        theirs.sep_token_id,
        theirs.mask_token_id,
    )
    assert ours.mask not in ours.encode(["x [MASK]"])[0]


# --- added tokens -----------------------------------------------------------------------------------------------------


def added_folder(folder: Path, how: str) -> tuple[Path, int]:
    """A LLaMA-like folder with two added tokens, the first is the end token, declared in one of three files."""
    model = sentencepiece_model(model_type="bpe")
    (folder / "tokenizer.model").write_bytes(model)
    own = SentencePieceProcessor(model_proto=model).get_piece_size()
    tokenizer_config: dict[str, Any] = {"eos_token": "<|end|>", "add_bos_token": False}
    facts = {"content": "<|end|>", "special": True}, {"content": "<tab>", "special": False}
    if how == "added_tokens.json":
        write_json(folder / how, {"<|end|>": own, "<tab>": own + 1, "<s>": 1})
    elif how == "tokenizer.json":
        write_json(folder / how, {"added_tokens": [{"id": own + i, **fact} for i, fact in enumerate(facts)]})
    else:
        tokenizer_config["added_tokens_decoder"] = {str(own + i): fact for i, fact in enumerate(facts)}
    write_json(folder / "tokenizer_config.json", tokenizer_config)
    return folder, own


@pytest.mark.parametrize("how", ["added_tokens.json", "tokenizer_config.json", "tokenizer.json"])
def test_added_tokens_of_a_sentencepiece_model_are_read_from_any_file(tmp_path: Path, how: str) -> None:
    folder, own = added_folder(tmp_path, how)
    imported = Tokenizer.load(folder)
    ours = imported.target
    assert (ours.size, ours.end, ours.prefix_ids, ours.suffix_ids, ours.sentinels) == (own + 2, own, (), (), ())
    assert ours.to_pieces([own, own + 1]) == ["<|end|>", "<tab>"]
    a, b = ours.encode(["A man", "dog"])
    assert ours.decode([*a, own, own + 1, *b]) == "A man<tab> dog"
    assert ours.decode_batch([[], [own], [own + 1], a]) == ["", "", "<tab>", "A man"]
    assert ours.decode_batch([]) == []
    assert own not in ours.encode(["<|end|>"])[0]
    assert copy.deepcopy(ours).end == own
    assert Tokenizer.from_files(imported.files).target.end == own


def test_tokenizer_config_of_a_sentencepiece_model_applies_to_existing_tokens_only(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.model").write_bytes(sentencepiece_model(model_type="bpe"))
    for tokenizer_config, expected in (
        ({}, (2, (1,), ())),
        ({"add_bos_token": True, "add_eos_token": True, "eos_token": "<unheard>"}, (2, (1,), (2,))),
        ({"add_bos_token": False, "eos_token": {"content": "<s>"}}, (1, (), ())),
        ({"added_tokens_decoder": {"x": {}, "-1": 3, str(10**12): {"content": "far"}}}, (2, (1,), ())),
    ):
        write_json(tmp_path / "tokenizer_config.json", tokenizer_config)
        ours = Tokenizer.load(tmp_path).target
        assert (ours.end, ours.prefix_ids, ours.suffix_ids) == expected


def test_our_own_model_needs_no_other_file(tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    write_json(tmp_path / "tokenizer_config.json", {"add_bos_token": False, "eos_token": "<s>"})
    write_json(tmp_path / "added_tokens.json", {"more": 10**6})
    ours, plain = Tokenizer.load(tmp_path).target, tokenizer().target
    assert (ours.size, ours.end, ours.prefix_ids) == (plain.size, plain.end, plain.prefix_ids)


# --- Whisper ----------------------------------------------------------------------------------------------------------

END, START, EN, TRANSCRIBE, NO_TIMESTAMPS = 300, 301, 302, 306, 310


def load_whisper(folder: Path) -> WhisperVocabulary:
    vocabulary = Tokenizer.load(folder).target
    assert isinstance(vocabulary, WhisperVocabulary)
    return vocabulary


@pytest.mark.parametrize("timestamps", [1501, 0])  # the first published tokenizers have no names for them
def test_whisper_encodes_and_decodes_as_transformers_does(tmp_path: Path, timestamps: int) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_whisper(whisper_folder(tmp_path, timestamps))
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    plain = [text for text in MIXED if "<|" not in text]
    rows = ours.encode(plain)
    assert rows == theirs(plain, add_special_tokens=False)["input_ids"]
    rows = [[NO_TIMESTAMPS + 1, *row, NO_TIMESTAMPS + 55, END] for row in rows]
    assert ours.decode_batch(rows) == theirs.batch_decode(
        rows, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )
    assert ours.decode(rows[0]) == plain[0]
    assert (ours.end, ours.pad, ours.start, ours.size) == (END, END, START, NO_TIMESTAMPS + 1 + 1501)
    assert ours.to_pieces([START, NO_TIMESTAMPS + 1, NO_TIMESTAMPS + 55]) == [
        "<|startoftranscript|>", "<|0.00|>", "<|1.08|>",
    ]  # fmt: skip


def test_timestamps_of_whisper_are_every_20_milliseconds(tmp_path: Path) -> None:
    ours = load_whisper(whisper_folder(tmp_path / "all"))
    assert ours.timestamps == range(NO_TIMESTAMPS + 1, NO_TIMESTAMPS + 1502)
    assert ours.to_pieces([ours.timestamps[0], ours.timestamps[-1]]) == ["<|0.00|>", "<|30.00|>"]
    assert load_whisper(whisper_folder(tmp_path / "few", 10)).timestamps == range(NO_TIMESTAMPS + 1, NO_TIMESTAMPS + 11)


def test_a_prompt_of_whisper_is_that_of_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ours = load_whisper(whisper_folder(tmp_path))
    theirs = transformers.WhisperTokenizer.from_pretrained(tmp_path)
    for language, task in (("en", "transcribe"), ("zh", "translate")):
        theirs.set_prefix_tokens(language=language, task=task, predict_timestamps=False)
        assert [ours.start, *build_prompt(ours, language, task)] == theirs.prefix_tokens
    assert build_prompt(ours, "en") == (EN, TRANSCRIBE, NO_TIMESTAMPS)
    assert build_prompt(ours, None) == (NO_TIMESTAMPS,)  # a model of English only
    assert ours.tags == ("en", "zh", "de")


def test_unknown_languages_and_tasks_of_whisper_are_refused(tmp_path: Path) -> None:
    ours = load_whisper(whisper_folder(tmp_path, 10))
    with pytest.raises(TokenizerError, match="no tag for 'fr'; its languages are en, zh, de"):
        build_prompt(ours, "fr")
    with pytest.raises(TokenizerError, match="must be one of transcribe, translate, but is 'sing'"):
        build_prompt(ours, "en", "sing")  # type: ignore[arg-type]
