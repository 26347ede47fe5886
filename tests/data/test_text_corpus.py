"""Text corpora: finding files, reading, labels, held-out texts and errors."""

from __future__ import annotations

import json
import lzma
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from attent.data import text_corpus
from attent.data.encode import CHUNK_CHARS, add_special_tokens, iter_document_ids, split_long_texts, truncate_texts
from attent.data.pairs import CorpusError
from attent.data.text_corpus import (
    TextCorpus,
    count_shared_texts,
    find_text_files,
    hold_out_texts,
    list_eval_files,
    read_texts,
)
from attent.data.token_store import encode_texts
from attent.text.bulk_encoder import EncodedSentences
from attent.text.tokenizer_training import TokenizerConfig, TokenizerKind, train_monolingual_tokenizer

TEXT = "To be, or not to be,\nthat is the question:\n\nWhether 'tis nobler in the mind to suffer\n" * 40


def write(path: Path, text: str) -> Path:
    path.write_text(text, encoding="utf-8", newline="\n")
    return path


def test_text_file_is_one_document_or_a_text_per_line(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt", "one\n\ntwo \n")
    assert read_texts([path], "documents").texts == ["one\n\ntwo \n"]
    assert read_texts([path], "lines").texts == ["one", "two"]


def test_json_lines_are_read_and_bad_ones_counted(tmp_path: Path) -> None:
    lines = [json.dumps({"text": "one"}), "{", json.dumps({"text": " "}), json.dumps({"title": 1}), '{"text": "a\\nb"}']
    corpus = read_texts([write(tmp_path / "a.jsonl", "\n".join(lines))], "lines")
    assert corpus.texts == ["one", "a\nb"]
    assert corpus.skipped == {"not a JSON object": 1, "empty": 1, "without a text": 1}


def test_compressed_files_and_siblings_are_found(tmp_path: Path) -> None:
    (tmp_path / "train.txt.xz").write_bytes(lzma.compress(b"train"))
    dev, test = write(tmp_path / "dev.txt", "dev"), write(tmp_path / "test.txt", "test")
    write(tmp_path / "notes.md", "x")
    for name in (tmp_path, tmp_path / "train.txt.xz"):
        corpus = find_text_files([str(name)])
        assert corpus.train == (tmp_path / "train.txt.xz",)
        assert (corpus.valid, corpus.test) == ((dev,), (test,))
    assert read_texts(find_text_files([str(tmp_path)]).train, "documents").texts == ["train"]
    assert list_eval_files([str(dev)], "valid") == (dev,)


def test_validation_files_among_all_files_are_not_trained_on(tmp_path: Path) -> None:
    names = ("test.txt", "train.txt", "valid.txt", "more.txt")
    test, train, valid, more = (write(tmp_path / name, name) for name in names)
    corpus = find_text_files([str(tmp_path / name) for name in names])
    assert (corpus.train, corpus.valid, corpus.test) == ((train, more), (valid,), (test,))
    assert find_text_files([str(valid), str(test)]).train == (
        valid,
        test,
    )  # without a train file they are the data


def test_folder_gives_its_requested_split(tmp_path: Path) -> None:
    train, test = write(tmp_path / "train.txt", "a"), write(tmp_path / "test.txt", "b")
    assert list_eval_files([str(tmp_path)], "test") == (test,)
    with pytest.raises(CorpusError, match="has files for test and train, but none for valid; give a file"):
        list_eval_files([str(tmp_path)], "valid")
    (tmp_path / "own").mkdir()
    other = write(tmp_path / "own" / "a.txt", "c")
    assert list_eval_files([str(tmp_path / "own"), str(train)], "valid") == (other, train)


def test_weights_of_texts_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "own.txt", "a")
    with pytest.raises(CorpusError, match="weights are for --task translate only"):
        find_text_files([f"{path}:3"])
    with pytest.raises(CorpusError, match="weights are for --task translate only"):
        list_eval_files([f"{path}:0.5"], "valid")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", "there is no text to learn from"),
        ("a.txt", b"  \n \n", "there is no text to learn from"),
        ("a.tmx", b"<tmx/>", "is a file of pairs (tmx), but must be plain text"),
        ("a.txt", b"good\nb\xff\xfed", "a.txt:2: is not UTF-8 text; save the file as UTF-8"),
        ("a.jsonl", b'{"src": "a"}\n', 'must be an object with the key "text", but its keys are src'),
    ],
)
def test_unreadable_texts_are_reported(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CorpusError) as caught:
        read_texts([tmp_path / name], "lines")
    assert message in str(caught.value)


def test_missing_file_is_reported() -> None:
    with pytest.raises(CorpusError, match=r"nowhere\.txt: there is no such file or folder"):
        find_text_files(["nowhere.txt"])


# ---- held out --------------------------------------------------------------------------------------------------------


def test_last_tenth_of_one_text_is_held_out() -> None:
    text = "".join(chr(97 + i % 26) for i in range(115_394))
    train, valid = hold_out_texts(TextCorpus("a", [text]), None, seed=1)
    assert train.texts == [text[: int(115_394 * 0.9)]]
    assert train.texts[0] + valid.texts[0] == text
    _, valid = hold_out_texts(TextCorpus("a", [text]), 100, seed=1)
    assert len(valid.texts[0]) == 100
    assert valid.name == "last part"
    _, valid = hold_out_texts(TextCorpus("a", [text, text]), 100, seed=1, layout="documents")
    assert (valid.name, [len(part) for part in valid.texts]) == ("last parts", [50, 50])
    _, valid = hold_out_texts(TextCorpus("a", ["x" * 6_000_000]), None, seed=1)
    assert len(valid.texts[0]) == 500_000
    with pytest.raises(CorpusError, match="a: has 9 characters, too few to hold out 9 of them; give more text"):
        hold_out_texts(TextCorpus("a", ["x" * 9]), 9, seed=1)


def test_held_out_texts_are_not_trained_on() -> None:
    texts = [f"text {i % 50}" for i in range(100)]  # each text twice
    labeled_text = [f"of {i % 50 % 3}" for i in range(100)]
    train, valid = hold_out_texts(TextCorpus("a", texts, labeled_text), None, seed=1)
    assert len(valid.texts) == 10
    assert not set(valid.texts) & set(train.texts)
    for part in (train, valid):
        assert all(label == f"of {int(text[5:]) % 3}" for text, label in zip(part.texts, part.labels, strict=True))
    assert hold_out_texts(TextCorpus("a", texts, labeled_text), None, seed=1)[1].texts == valid.texts
    assert hold_out_texts(TextCorpus("a", texts, labeled_text), None, seed=2)[1].texts != valid.texts
    with pytest.raises(CorpusError, match="must be less than the 100 texts"):
        hold_out_texts(TextCorpus("a", texts), 100, seed=1)


def test_copies_are_held_out_together() -> None:
    texts = ["fine"] * 300 + [f"text {i}" for i in range(50)] * 2
    train, valid = hold_out_texts(TextCorpus("a", texts), None, seed=3)
    assert sorted(train.texts + valid.texts) == sorted(texts)
    assert not set(valid.texts) & set(train.texts)
    assert len(valid.texts) == 40
    train, valid = hold_out_texts(TextCorpus("a", ["x"] * 5 + ["y"] * 4), 1, seed=1)
    assert valid.texts == ["y"] * 4  # the smallest possible number
    with pytest.raises(CorpusError, match="all its texts are the same, so that none can be held out"):
        hold_out_texts(TextCorpus("a", ["x"] * 9), None, seed=1)


def test_texts_that_are_trained_on_are_counted() -> None:
    long, short = "x" * 20, "y" * 19
    train, other = TextCorpus("a", [f"{long}\n{short}"]), TextCorpus("b", [f"{short}\n{long}\nz\n{long}"])
    assert count_shared_texts(train, other, "documents") == 2
    assert count_shared_texts(train, other, "lines") == 0
    assert count_shared_texts(TextCorpus("a", [short]), TextCorpus("b", [short, long, short]), "lines") == 2


def test_held_out_texts_are_stratified_by_label() -> None:
    labeled_text = ["often"] * 160 + ["some"] * 38 + ["rare", "once"]
    for seed in range(8):
        train, valid = hold_out_texts(TextCorpus("a", [f"text {i}" for i in range(200)], labeled_text), 20, seed)
        assert len(valid.texts) == 20
        assert valid.labels.count("often") in (15, 16)
        assert valid.labels.count("some") in (3, 4)
        assert set(train.labels) == set(labeled_text)
    with pytest.raises(CorpusError, match="each label has one text only"):
        hold_out_texts(TextCorpus("a", ["x", "y", "z"], ["1", "2", "3"]), 1, seed=1)


def test_end_of_each_of_a_few_documents_is_held_out() -> None:
    long, short = "abcdefghij" * 100, "0123456789" * 10
    train, valid = hold_out_texts(TextCorpus("a", [long, short]), None, 1, "documents")
    assert train.texts == [long[:900], short[:90]]
    assert valid.texts == [long[900:], short[90:]]
    _, valid = hold_out_texts(TextCorpus("a", [long, short]), 11, 1, "documents")
    assert [len(text) for text in valid.texts] == [10, 1]


def test_tenth_of_the_characters_of_many_documents_is_held_out() -> None:
    texts = [chr(97 + i % 26) * (10_000 if i == 3 else 10 * (i + 1)) for i in range(40)]
    for seed in range(5):
        train, valid = hold_out_texts(TextCorpus("a", texts), None, seed, "documents")
        assert sorted(train.texts + valid.texts) == sorted(texts)
        assert 0.08 * sum(map(len, texts)) < valid.char_count <= 0.1 * sum(map(len, texts))
    assert len(hold_out_texts(TextCorpus("a", texts), 7, 1, "documents")[1].texts) == 7
    equal = [f"{i:03}" * 10 for i in range(100)]
    assert len(hold_out_texts(TextCorpus("a", equal), None, 1, "documents")[1].texts) == 10


def test_shared_texts_are_counted() -> None:
    assert count_shared_texts(TextCorpus("a", ["x", "y"]), TextCorpus("b", ["y", "z", "y"]), "lines") == 2
    line = "a line that is long enough"
    assert count_shared_texts(TextCorpus("a", [f"b\n{line}\n"]), TextCorpus("b", [f"b\n{line}", "c"]), "documents") == 1


# ---- labels ----------------------------------------------------------------------------------------------------------

FEW = "a fine film\t1\nbad\t0\ngood\t1\n"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.tsv", FEW),
        ("a.tsv", "sentence\tlabel\n" + FEW),
        ("a.tsv", "label\tid\tsentence\n1\t7\ta fine film\n0\t8\tbad\n1\t9\tgood\n"),
        ("a.tsv", "1\ta fine film\n0\tbad\n1\tgood\n"),
        ("a.jsonl", '{"text": "a fine film", "label": 1}\n{"text": "bad", "label": 0}\n{"text": "good", "label": 1}\n'),
        (
            "a.jsonl",
            '\n{"review": "a fine film", "class": 1.0}\n{"class": "0", "review": "bad"}\n{"review": "good","class": 1}',
        ),
        ("a.tsv", 'text\tlabel\n"a fine film"\t1\nbad\t"0"\ngood\t1\n'),
        ("a.tsv", "text\tlabel\na fine film\t1\nbad\t0\nwith\ta tab\t0\ngood\t1\nno tab\n"),
        ("a.tsv", "a fine film\t1\nbad\t0\nwith\ta tab\t0\ngood\t1\n"),
    ],
    ids=["plain", "named", "named otherwise", "label first", "json", "json otherwise", "quoted", "tabs", "tabs, plain"],
)
def test_all_label_layouts_are_read(tmp_path: Path, name: str, content: str) -> None:
    corpus = text_corpus.read_labeled_texts([write(tmp_path / name, content)])
    assert corpus.texts == ["a fine film", "bad", "good"]
    assert corpus.labels == ["1", "0", "1"]


def test_lines_of_another_width_are_skipped(tmp_path: Path) -> None:
    corpus = text_corpus.read_labeled_texts(
        [write(tmp_path / "a.tsv", "text\tlabel\nfine\t1\nwith\ta tab\t0\nbad\t0\nnone\n")]
    )
    assert corpus.skipped == {"not of 2 columns": 2}
    assert corpus.notes == ("a.tsv: header found; texts are `text`, labels are `label`",)
    assert text_corpus.read_labeled_texts([write(tmp_path / "b.tsv", "1\tone text\n0\tanother\n0\tbad\n")]).notes == (
        "b.tsv: texts are column 2, labels are column 1",
    )


def test_pandas_quotes_are_removed(tmp_path: Path) -> None:
    content = 'text\tlabel\n"He said ""hi"""\t1\n"a" and "b"\t0\n"\t1\n'
    assert text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", content)]).texts == [
        'He said "hi"',
        '"a" and "b"',
        '"',
    ]


def test_unnamed_header_is_recognized(tmp_path: Path) -> None:
    rows = "".join(f"text {i}\t{i % 2}\n" for i in range(20))
    corpus = text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", f"tweet\tpolarity\n{rows}")])
    assert len(corpus.texts) == 20
    assert set(corpus.labels) == {"0", "1"}
    assert "texts are `tweet`, labels are `polarity`" in corpus.notes[0]
    for first in ("a tweet\tpolarity\n", "tweet\t1\n"):  # a text with a label that others have
        assert len(text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", first + rows)]).texts) == 21


def test_lines_that_cannot_be_used_are_counted_by_reason(tmp_path: Path) -> None:
    rows = "text\tlabel\nfine\t1\nbad\t0\ngood\t1\n \t0\nnone\t\na\tb\tc\n"
    corpus = text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", rows)])
    assert corpus.skipped == {"empty": 1, "without a label": 1, "not of 2 columns": 1}
    records = [
        {"text": "fine", "label": True},
        {"text": " bad ", "label": 2.0},
        {"text": "odd", "label": 2.5},
        {"text": "", "label": 1},
        {"text": 3, "label": 1},
        {"text": "none", "label": None},
        {"text": "none", "label": " "},
        {"text": "list", "label": [1]},
    ]
    content = "".join(f"{json.dumps(record)}\n" for record in records)
    corpus = text_corpus.read_labeled_texts([write(tmp_path / "b.jsonl", content)])
    assert (corpus.texts, corpus.labels) == (["fine", "bad", "odd"], ["true", "2", "2.5"])
    assert corpus.skipped == {"empty": 2, "without a label": 3}
    assert corpus.notes == ("b.jsonl: texts are `text`, labels are `label`",)
    files = [tmp_path / "a.tsv", tmp_path / "b.jsonl"]
    both = text_corpus.read_labeled_texts(files)
    assert (both.name, both.files, len(both.texts)) == ("a.tsv, b.jsonl", tuple(files), 6)


def test_half_of_the_lines_must_have_a_label(tmp_path: Path) -> None:
    path = write(tmp_path / "a.tsv", "text\tlabel\nfine\t1\nnone\t\n")
    assert text_corpus.read_labeled_texts([path]).texts == ["fine"]
    path = write(
        tmp_path / "a.jsonl", '{"text": "a", "label": ""}\n{"text": "", "label": 1}\n{"text": "b", "label": 0.5}\n'
    )
    assert text_corpus.read_labeled_texts([path]).labels == ["0.5"]
    write(path, '{"text": "a", "label": ""}\n{"text": "", "label": 1}\n{"text": "b"}\n')
    with pytest.raises(
        CorpusError, match=r"has no text with a label; .*; 2 lines are without a label; 1 lines are empty"
    ):
        text_corpus.read_labeled_texts([path])


def test_too_many_labels_are_translations(tmp_path: Path) -> None:
    def count_labels(texts: int, labels: int) -> int:
        rows = "".join(f"text {i}\tlabel {i % labels}\n" for i in range(texts))
        return len(set(text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", f"text\tlabel\n{rows}")]).labels))

    assert count_labels(19, 19) == 19
    assert count_labels(20, 10) == 10
    with pytest.raises(CorpusError, match="11 different labels for 20 texts, too many to learn"):
        count_labels(20, 11)
    assert text_corpus.MAX_LABELS == 10_000


def test_labels_have_fewer_values_or_are_shorter(tmp_path: Path) -> None:
    for rows, note in (
        ("a\tx\nb\tx\n", "texts are column 1, labels are column 2"),
        ("x\ta\nx\tb\n", "texts are column 2, labels are column 1"),
        ("long text\tx\nlonger text\ty\n", "texts are column 1, labels are column 2"),
        ("x\tlong text\ny\tlonger text\n", "texts are column 2, labels are column 1"),
        ("a\tx\nb\ty\n", "texts are column 1, labels are column 2"),
    ):
        assert text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", rows)]).notes == (f"a.tsv: {note}",)


@pytest.mark.parametrize(("count", "is_header"), [(9, False), (10, True)])
def test_ten_lines_show_an_unnamed_header(count: int, is_header: bool, tmp_path: Path) -> None:
    rows = "".join(f"tweet {i}\t{i % 2}\n" for i in range(count))
    corpus = text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", f"tweet\tpolarity\n{rows}")])
    assert len(corpus.texts) == count + (not is_header)


def test_other_kinds_of_files_have_no_labels(tmp_path: Path) -> None:
    with pytest.raises(CorpusError, match=r"is a file of translations; texts with labels are \.tsv"):
        text_corpus.read_labeled_texts([write(tmp_path / "a.tmx", "<tmx/>")])
    path = write(tmp_path / "a.jsonl", '\n{"sentence": "a", "kind": 1}\n')
    with pytest.raises(
        CorpusError, match=r'a\.jsonl:2: must be an object with the keys "text" and "label", but has sente'
    ):
        text_corpus.read_labeled_texts([path])


def test_labels_are_sorted_and_numbers_by_value() -> None:
    assert text_corpus.sort_labels(["10", "9", "10", "2"]) == ("2", "9", "10")
    assert text_corpus.sort_labels(["b", "10", "a"]) == ("10", "a", "b")
    orders = {text_corpus.sort_labels(order) for order in permutations(["nan", "10", "9", "inf"])}
    assert orders == {("10", "9", "inf", "nan")}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is empty; a line needs a text and a label"),
        ("a text\nanother\n", "must have two columns, a text and its label"),
        ("sentence\tlabel\na\tx\nb\t\nc\t\n", "2 of its 3 lines have no text or no label"),
        ("".join(f"a man {i}\tein Mann {i}\n" for i in range(30)), "30 different labels for 30 texts"),
        ("id\tquestion\tsentence\tlabel\n0\ta\tb\tx\n", "several texts in a line (question, sentence), and labels of"),
        ("sentence1\tsentence2\tlabel\na\tb\tx\n", "pairs of texts are not supported; keep one of them"),
    ],
    ids=["empty", "one column", "missing", "translations", "question and sentence", "two sentences"],
)
def test_files_without_labels_are_reported(tmp_path: Path, content: str, message: str) -> None:
    with pytest.raises(CorpusError) as caught:
        text_corpus.read_labeled_texts([write(tmp_path / "a.tsv", content)])
    assert message in str(caught.value)


# ---- token ids -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bpe", "unigram", "char"])
def test_chunked_encoding_equals_encoding_the_whole_text(kind: TokenizerKind, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = train_monolingual_tokenizer([TEXT], TokenizerConfig(kind=kind)).source
    expected_ids = vocabulary.encode([TEXT])[0]
    for chunk_chars in (1, 50, CHUNK_CHARS):
        monkeypatch.setattr("attent.data.encode.CHUNK_CHARS", chunk_chars)
        assert list(iter_document_ids(TEXT, vocabulary)) == expected_ids
    assert vocabulary.decode(expected_ids) == TEXT
    if kind == "char":
        assert len(expected_ids) == len(TEXT) + 1  # the leading space that SentencePiece adds


def test_tokenizer_has_a_mask_or_sentinels_on_request() -> None:
    plain, masked = (
        train_monolingual_tokenizer([TEXT], TokenizerConfig()).source,
        train_monolingual_tokenizer([TEXT], TokenizerConfig(), mask=True).source,
    )
    spans = train_monolingual_tokenizer([TEXT], TokenizerConfig(), sentinels=7).source
    assert plain.mask is None
    assert masked.mask is not None
    assert masked.to_pieces([masked.mask]) == ["<mask>"]
    assert spans.to_pieces(spans.sentinels) == [f"<extra_id_{i}>" for i in range(7)]
    assert masked.mask not in masked.encode(["<mask>"])[0]


def test_encoded_texts_are_cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    vocabulary = train_monolingual_tokenizer([TEXT], TokenizerConfig()).source
    texts = ["to be", "or not", "to be or not"]
    first, key = encode_texts(texts, vocabulary, "f", tmp_path, as_documents=False)
    assert [row.tolist() for row in np.split(first.ids, first.lengths.cumsum())[:-1]] == vocabulary.encode(texts)
    monkeypatch.setattr("attent.data.encode.encode_lines", None)
    again, same = encode_texts(texts, vocabulary, "f", tmp_path, as_documents=False)
    assert same == key
    assert (again.ids == first.ids).all()


def test_special_tokens_truncation_and_splitting() -> None:
    sentences = EncodedSentences(np.arange(10, 17).astype("<u4"), np.array([3, 0, 4]))
    framed = add_special_tokens(sentences, (1, 2), (9,))
    assert framed.ids.tolist() == [1, 2, 10, 11, 12, 9, 1, 2, 9, 1, 2, 13, 14, 15, 16, 9]
    assert framed.lengths.tolist() == [6, 3, 7]
    assert truncate_texts(sentences, 2).ids.tolist() == [10, 11, 13, 14]
    parts = split_long_texts(sentences, 3)
    assert parts.lengths.tolist() == [3, 0, 2, 2]
    assert (parts.ids == sentences.ids).all()
