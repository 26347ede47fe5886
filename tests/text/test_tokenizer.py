"""Tokenizers: any text round-trips; saving, loading, sending to workers."""

from __future__ import annotations

import multiprocessing
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sentencepiece import SentencePieceProcessor

from attent.text.tokenizer import Tokenizer, TokenizerError
from attent.text.tokenizer_training import TokenizerConfig, TokenizerKind, train_tokenizer
from attent.text.vocabulary import END, PAD, START, UNKNOWN
from tests.text.corpus import lines, tokenizer

KINDS: tuple[TokenizerKind, ...] = ("bpe", "unigram", "char")
ODD = [
    "",
    " ",
    "     ",
    "two  spaces,   three",
    " before and behind ",
    "a\ttab\nand\r\na line\u2028end",
    "nul \x00, escape \x1b, substitute \x1a, \x1a0 \x1a1 \x1a\x1a",
    "▁ ▁▁ a▁b \x1a▁\x1a",
    "▅ and ⁇ and \ufffd",
    "👩‍👩‍👧‍👦 🇩🇪 👍🏽",
    "e\u0301 vs é, ﬁ vs fi, ② vs 2, Å vs Å",
    "<s> </s> <unk> <pad> <2de> <2pt-BR>",
    "<0x41><0xE2>",
    "\ufeffBOM",
    "fullwidth Ａ　space",
    "soft\u00adhyphen, zero\u200bwidth, no\u00a0break",
    "ಕನ್ನಡ ไทย 汉字 עברית \U0010fffd",
    "%s %%s {name}{name} {nam",
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("text", ODD)
def test_an_odd_text_round_trips(kind: TokenizerKind, text: str) -> None:
    vocabulary = tokenizer(kind).source
    (ids,) = vocabulary.encode([text])
    assert vocabulary.decode(ids) == text
    assert UNKNOWN not in ids


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(texts=st.lists(st.text() | st.text(alphabet="▁\x1a01 ab%s<>2de"), max_size=4))
def test_any_texts_round_trip(kind: TokenizerKind, texts: list[str]) -> None:
    vocabulary = tokenizer(kind).source
    assert [vocabulary.decode(ids) for ids in vocabulary.encode(texts)] == texts


def test_every_unicode_character_round_trips() -> None:
    vocabulary = tokenizer().source
    numbers = [n for n in range(0x110000) if not 0xD800 <= n < 0xE000]
    texts = ["".join(map(chr, numbers[at : at + 997])) for at in range(0, len(numbers), 997)]
    assert [vocabulary.decode(ids) for ids in vocabulary.encode(texts)] == texts


def test_lone_surrogates_become_replacement_characters_and_pairs_are_joined() -> None:
    vocabulary = tokenizer().source
    rows = vocabulary.encode(["fine", "half \ud83d of", "whole \ud83d\ude00"])
    assert [vocabulary.decode(ids) for ids in rows] == ["fine", "half \ufffd of", "whole 😀"]


def test_no_text_gives_a_special_id() -> None:
    vocabulary = tokenizer().source
    specials = {PAD, START, END, UNKNOWN, *map(vocabulary.get_tag_id, vocabulary.tags)}
    assert not specials & {i for ids in vocabulary.encode([*ODD, *lines()[0]]) for i in ids}


def test_special_tokens_and_tags_are_not_decoded() -> None:
    vocabulary = tokenizer().source
    (ids,) = vocabulary.encode(["A man."])
    assert vocabulary.decode([START, vocabulary.get_tag_id("de"), *ids, UNKNOWN, END, PAD, PAD]) == "A man."


def test_the_special_ids_are_the_documented_ones() -> None:
    vocabulary = tokenizer().source
    assert (vocabulary.pad, vocabulary.start, vocabulary.end, vocabulary.unknown) == (0, 1, 2, 3)
    assert vocabulary.to_pieces([0, 1, 2, 3]) == ["<pad>", "<s>", "</s>", "<unk>"]


def test_pieces_are_readable() -> None:
    vocabulary = tokenizer("char").source
    (ids,) = vocabulary.encode(["a €"])
    assert vocabulary.to_pieces(ids) == ["▁", "a", "▁", "<0xE2>", "<0x82>", "<0xAC>"]


def test_a_symbol_is_always_one_piece() -> None:
    for kind in KINDS:
        vocabulary = tokenizer(kind).source
        (ids,) = vocabulary.encode(["x%sy{name}z"])
        assert {"%s", "{name}"} <= set(vocabulary.to_pieces(ids))


def test_the_end_token_is_last_and_the_tag_first() -> None:
    ours = tokenizer()
    (plain,), (tagged,) = ours.encode_source(["A man."]), ours.encode_source(["A man."], target_language="pt-BR")
    assert plain[-1] == END
    assert plain.count(END) == 1
    assert tagged == [ours.source.get_tag_id("pt-BR"), *plain]
    assert ours.source.to_pieces(tagged[:1]) == ["<2pt-BR>"]
    assert ours.encode_target(["A man."]) == [plain]
    assert ours.encode_target([]) == []


def test_an_unknown_language_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="no tag for 'fr'; its languages are de, pt-BR"):
        tokenizer().encode_source(["A man."], target_language="fr")
    with pytest.raises(ValueError, match="no tag for 'fr'; it has no tags"):
        tokenizer(joint=False).target.get_tag_id("fr")


@pytest.mark.parametrize("wrong", [-1, 10**6])
def test_an_id_of_another_model_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=f"ids must be from 0 to .*, but one is {wrong}"):
        tokenizer().source.decode([5, wrong])
    with pytest.raises(ValueError, match="ids must be"):
        tokenizer().source.to_pieces([wrong])


def test_joint_is_one_vocabulary_and_separate_are_two() -> None:
    assert tokenizer().joint
    assert tokenizer().source is tokenizer().target
    assert not tokenizer(joint=False).joint
    assert tokenizer(joint=False).encode_source(["Ein Mann."]) != tokenizer(joint=False).encode_target(["Ein Mann."])


# --- saving, loading, pickling ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("joint", "names"),
    [(True, ["tokenizer.model", "tokenizer_format.json"]), (False, ["source.model", "target.model"])],
)
def test_a_saved_tokenizer_loads_as_the_same(tmp_path: Path, joint: bool, names: list[str]) -> None:
    tokenizer(joint=joint).save(tmp_path / "new" / "folder")
    loaded = Tokenizer.load(tmp_path / "new" / "folder")
    assert sorted(os.listdir(tmp_path / "new" / "folder")) == names
    assert loaded == tokenizer(joint=joint)
    assert loaded.joint == joint
    assert loaded.encode_target(ODD) == tokenizer(joint=joint).encode_target(ODD)


def test_the_saved_file_is_plain_sentencepiece(tmp_path: Path) -> None:
    tokenizer().save(tmp_path)
    theirs = SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    assert theirs.encode("Ein Mann.") == tokenizer().source.encode(["Ein Mann."])[0]


def test_a_folder_holds_one_tokenizer_at_a_time(tmp_path: Path) -> None:
    for joint in (True, False, True):
        tokenizer(joint=joint).save(tmp_path)
        assert Tokenizer.load(tmp_path) == tokenizer(joint=joint)


def test_different_tokenizers_have_different_fingerprints() -> None:
    several = [tokenizer(kind, joint) for kind in KINDS for joint in (True, False)]
    assert len({tokenizer_.fingerprint for tokenizer_ in several}) == len(several)
    assert len(set(several)) == len(several)
    again = train_tokenizer(*lines(), TokenizerConfig(vocab=350, symbols=("%s", "{name}")), tags=("de", "pt-BR"))
    assert again.fingerprint == tokenizer().fingerprint


def test_the_fingerprint_depends_on_the_order_of_the_sides() -> None:
    files = tokenizer(joint=False).files
    turned = Tokenizer.from_files({"source.model": files["target.model"], "target.model": files["source.model"]})
    assert turned.fingerprint != tokenizer(joint=False).fingerprint


def test_a_worker_process_gets_the_same_tokenizer() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.apply(encode_in_worker, (tokenizer(),)) == (True, tokenizer().encode_source(ODD))


def encode_in_worker(ours: Tokenizer) -> tuple[bool, list[list[int]]]:
    return ours.joint, ours.encode_source(ODD)


class KilledSave(BaseException):
    """Raised in place of a kill of the process."""


@pytest.mark.parametrize("joint", [True, False])
def test_a_save_killed_anywhere_leaves_the_old_or_the_new(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, joint: bool
) -> None:
    old, new = tokenizer("bpe", joint), tokenizer("unigram", joint)
    loaded_tokenizers = []
    for steps in range(20):
        folder = tmp_path / str(steps)
        old.save(folder)
        with suppress(KilledSave), monkeypatch.context() as patch:
            kill_after(patch, steps)
            new.save(folder)
        loaded = Tokenizer.load(folder)
        assert loaded in (old, new)
        loaded_tokenizers.append(loaded)
        old.save(folder)  # and leftovers do not disturb a later save
        assert Tokenizer.load(folder) == old
    assert loaded_tokenizers[0] == old
    assert loaded_tokenizers[-1] == new


@pytest.mark.parametrize("first", range(1, 10))
def test_two_killed_saves_do_not_mix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: int) -> None:
    several = [tokenizer(kind, joint=False) for kind in KINDS]
    several[0].save(tmp_path)
    for tokenizer_to_save, steps in zip(several[1:], (first, 1), strict=True):
        with suppress(KilledSave), monkeypatch.context() as patch:
            kill_after(patch, steps)
            tokenizer_to_save.save(tmp_path)
    assert Tokenizer.load(tmp_path) in several


def kill_after(patch: pytest.MonkeyPatch, steps: int) -> None:
    """Kill a save after this many disk operations."""
    left = [steps]
    for name in ("fsync", "replace", "unlink"):
        patch.setattr(os, name, count_steps(getattr(os, name), left))


def count_steps(function: Any, left: list[int]) -> Any:
    def step(*arguments: Any) -> Any:
        if not left[0]:
            raise KilledSave
        left[0] -= 1
        return function(*arguments)

    return step


# --- errors when loading ---------------------------------------------------------------------------------------------


def error_message(folder: Path) -> str:
    with pytest.raises(TokenizerError) as caught:
        Tokenizer.load(folder)
    return str(caught.value)


def test_a_folder_without_a_tokenizer_names_the_expected_files(tmp_path: Path) -> None:
    assert error_message(tmp_path) == (
        f"{tmp_path}: has no tokenizer; it must have one of source.model, source.spm, tokenizer.model, spiece.model, "
        f"tokenizer.json, sentencepiece.bpe.model (which `save_pretrained` of transformers writes)"
    )
    assert "does not exist" in error_message(tmp_path / "none")
    (tmp_path / "file").write_text("")
    assert "is a file" in error_message(tmp_path / "file")


def test_an_incomplete_tokenizer_names_the_missing_file(tmp_path: Path) -> None:
    tokenizer(joint=False).save(tmp_path)
    (tmp_path / "target.model").unlink()
    assert error_message(tmp_path) == f"{tmp_path}/target.model: is missing; source.model needs it"


@pytest.mark.parametrize("damage", [b"", b"\x00", b"not a model", b"\xff" * 1000, b"\n\x0b\n\x03abc\x15\x00\x00\x80?"])
def test_a_damaged_model_is_named(tmp_path: Path, damage: bytes, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tokenizer.model").write_bytes(damage)
    assert error_message(tmp_path).startswith(f"{tmp_path}/tokenizer.model: ")
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("kind", ["bpe", "unigram"])
def test_a_model_damaged_anywhere_is_refused_or_works(tmp_path: Path, kind: TokenizerKind) -> None:
    files = tokenizer(kind).files
    whole = bytearray(files["tokenizer.model"])
    for at in range(0, len(whole), 61):
        broken = bytes(whole[:at]) if at % 2 else bytes([*whole[:at], whole[at] ^ 0x55, *whole[at + 1 :]])
        with suppress(TokenizerError):
            loaded = Tokenizer.from_files({**files, "tokenizer.model": broken})
            loaded.target.decode(loaded.encode_source(["A man. %s ▁ 😀"])[0])


def test_too_large_and_special_files_are_refused(tmp_path: Path) -> None:
    with open(tmp_path / "tokenizer.model", "wb") as file:
        file.truncate(200 * 2**20)
    assert "must have at most 128 MiB" in error_message(tmp_path)
    (tmp_path / "tokenizer.model").unlink()
    (tmp_path / "tokenizer.model").mkdir()
    assert "must be a file" in error_message(tmp_path)
