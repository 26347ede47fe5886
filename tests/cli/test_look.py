"""The `attent look` command: page, figures, JSON, live page, usage errors."""

from __future__ import annotations

import http.client
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent import cli
from attent.cli import look
from attent.cli.shared import print_status
from attent.inspection.head_stats import HEAD_STATS_FILE
from attent.inspection.session import Inspection
from attent.models import CausalLM, Seq2Seq, TextEncoder, VisionTransformer
from attent.models.weights import save_model
from attent.training.events import LOG_FILE, EventLog, Validated, ValidationSample
from attent.training.loop import write_model
from tests.inspection import models
from tests.inspection.toy_translator import TEXT, model
from tests.text.corpus import lines, tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "toy"
    path.mkdir()
    write_model(path, model(), tokenizer())
    return path


@pytest.fixture
def folder_copy(folder: Path, tmp_path: Path) -> Path:
    """A folder that a test may change."""
    return shutil.copytree(folder, tmp_path / "toy")


@pytest.fixture(autouse=True)
def working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def read_page_data(text: str) -> dict[str, object]:
    (block,) = re.findall('<script type="application/json" id="document">(.*?)</script>', text, re.DOTALL)
    data: dict[str, object] = json.loads(block)
    return data


def test_page_is_written(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["look", str(folder), TEXT, "--to", "de"]) == 0
    assert capsys.readouterr().out == "look.html\n"
    page_data = read_page_data(Path("look.html").read_text(encoding="utf-8"))
    assert (page_data["title"], page_data["model"]["name"]) == (TEXT, "toy")  # type: ignore[index]
    assert "live" not in page_data


def test_json_to_file_or_stdout(folder: Path, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert cli.main(["look", str(folder), TEXT, "--to", "de", "--json", "-", "--kind", "cross", "--layer", "1"]) == 0
    printed = capfdbinary.readouterr().out.decode()
    assert list(Inspection.from_json(printed).attention) == ["decoder.blocks.1.cross_attn"]
    assert cli.main(["look", str(folder), TEXT, "--to", "de", "--json", "t.json", "--target", "Hallo"]) == 0
    assert json.loads(Path("t.json").read_text(encoding="utf-8"))["decoding"]["given"] is True
    assert not Path("look.html").exists()


def test_figures(folder: Path) -> None:
    pytest.importorskip("matplotlib")
    assert (
        cli.main(
            [
                "look",
                str(folder),
                TEXT,
                "--to",
                "de",
                "--png",
                "a.png",
                "--svg",
                "a.svg",
                "--layer",
                "0",
                "--kind",
                "cross",
            ]
        )
        == 0
    )
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in Path("a.svg").read_text(encoding="utf-8")


def test_outputs_are_neither_one_file_nor_the_model(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["look", str(folder), TEXT, "--to", "de", "--json"]
    assert cli.main([*arguments, "same.html", "-o", "same.html"]) == 1
    assert "same.html: must not be the file of two outputs" in capsys.readouterr().err
    assert cli.main([*arguments, str(folder / "config.json")]) == 1
    assert "config.json: must not be an input" in capsys.readouterr().err


def test_head_statistics_are_measured_and_stored(folder_copy: Path) -> None:
    pairs = zip(*lines(40), strict=True)
    Path("valid.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    arguments = ["look", str(folder_copy), TEXT, "--to", "de", "--json", "t.json"]
    assert cli.main([*arguments, "--data", "valid.tsv", "--src", "en", "--tgt", "de"]) == 0
    first = json.loads(Path("t.json").read_text(encoding="utf-8"))["head_stats"]
    assert first["sentences"] == 40
    assert cli.main(arguments) == 0
    assert json.loads(Path("t.json").read_text(encoding="utf-8"))["head_stats"] == first


def test_statistics_are_replaced(folder_copy: Path) -> None:
    pairs = [f"{source}\t{target}\n" for source, target in zip(*lines(40), strict=True)]
    Path("valid.tsv").write_text("".join(pairs), encoding="utf-8")
    arguments = ["look", str(folder_copy), TEXT, "--to", "de", "--json", "t.json", "--data", "valid.tsv", "--src", "en"]
    for limit in (20, 5):
        assert cli.main([*arguments, "--tgt", "de", "--limit", str(limit)]) == 0
        assert json.loads(Path("t.json").read_text(encoding="utf-8"))["head_stats"]["sentences"] == limit
        assert json.loads((folder_copy / HEAD_STATS_FILE).read_text())["sentences"] == limit


def test_damaged_statistics_are_refused(folder_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("valid.tsv").write_text("a man\tein Mann\n", encoding="utf-8")
    arguments = ["look", str(folder_copy), TEXT, "--to", "de", "--json", "t.json"]
    assert cli.main([*arguments, "--data", "valid.tsv", "--src", "en", "--tgt", "de"]) == 0
    (folder_copy / HEAD_STATS_FILE).write_text("{bad")
    assert cli.main(arguments) == 1
    assert f"{HEAD_STATS_FILE}: is damaged" in capsys.readouterr().err


def test_head_aligned_on_input_is_labeled_by_input() -> None:
    def get_query_side(read: float, written: float) -> str:
        heads = [{"path": "p", "head": 1, "values": {"aligned_on_input": read, "aligned_on_output": written}}]
        data = {"head_stats": {"heads": heads}, "layers": [{"path": "p", "queries": "target"}]}
        return Inspection(data).label_rows("p", 1)["layers"][0]["queries"]

    assert (get_query_side(0.9, 0.4), get_query_side(0.4, 0.9), get_query_side(0.5, 0.5)) == (
        "decoder_input",
        "target",
        "target",
    )


def test_flags_reach_the_inspection(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: dict[str, Any] = {}

    def keep_call(inspector: Any, text: str, **options: Any) -> Any:
        calls.update(text=text, dtype=next(inspector.model.parameters()).dtype, **options)
        raise ValueError("seen")

    monkeypatch.setattr("attent.inspection.session.look", keep_call)
    flags = "--to de --beam-size 2 --mask decoder.blocks.0 --kind cross --layers 1 --target Hallo --dtype bfloat16"
    assert cli.main(["look", str(folder), TEXT, *flags.split()]) == 1
    assert calls == {
        "text": TEXT, "dtype": torch.bfloat16, "text_pair": None, "target": "Hallo", "to": "de", "beam_size": 2,
        "mask": ("decoder.blocks.0",), "kind": "cross", "layers": (1,),
    }  # fmt: skip


def test_masked_part(folder: Path) -> None:
    assert (
        cli.main(
            ["look", str(folder), TEXT, "--to", "de", "--json", "t.json", "--mask", "decoder.blocks.0.cross_attn:1"]
        )
        == 0
    )
    layers = json.loads(Path("t.json").read_text(encoding="utf-8"))["layers"]
    assert {layer["path"]: layer["masked_heads"] for layer in layers if layer["masked_heads"]} == {
        "decoder.blocks.0.cross_attn": [1]
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["a", "--mask", "decoder.blocks.9"], "has no part 'decoder.blocks.9'; did you mean decoder.blocks."),
        (["a", "--layer", "9"], "must select an attention layer"),
        (["a", "--to", "fr"], "--to must be one of its target languages"),
        (["a", "--svg", "a.svg", "--kind", "cross", "--layer", "0", "--head", "9"], "no head of this layer"),
    ],
)
def test_a_selection_that_the_model_lacks_is_reported(
    folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    to = [] if "--to" in arguments else ["--to", "de"]
    assert cli.main(["look", str(folder), *arguments, *to]) == 1
    assert words in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"port": 0, "limit": 1, "threads": 1, "beam_size": 1, "max_bleu_drop": 0.0}, None),
        ({"port": 65_535}, None),
        ({"port": 65_536}, "--port must be from 0 to 65535, but is 65536"),
        ({"port": -1}, "--port must be from 0 to 65535, but is -1"),
        ({"limit": 0}, "--limit must be 1 or more, but is 0"),
        ({"threads": 0}, "--threads must be 1 or more, but is 0"),
        ({"beam_size": 0}, "--beam-size must be 1 or more, but is 0"),
        ({"max_bleu_drop": -0.1}, "--max-bleu-drop must be 0 or more, but is -0.1"),
        ({"json": "-"}, None),
        ({"png": Path("A.PNG"), "svg": Path("a.pdf")}, None),
        ({"png": Path("a.jpg")}, "--png must be a file that ends in .png, but is a.jpg"),
        ({"svg": Path("a.png")}, "--svg must be a file that ends in .svg or .pdf, but is a.png"),
        (
            {"json": "nowhere/t.json"},
            "nowhere/t.json: must be a file in an existing folder, but is not; create the folder first",
        ),
        ({"out": Path(".")}, ".: must be a file in an existing folder, but is not; create the folder first"),
    ],
)
def test_values_at_their_limits(flags: dict[str, Any], problem: str | None) -> None:
    assert look.find_value_problem(look.LookFlags(**flags)) == problem


@pytest.mark.parametrize(
    ("sentence", "flags", "problem"),
    [
        (None, {"ablate": True, "data": ("d",)}, None),
        (None, {"prune": Path("p"), "data": ("d",)}, None),
        (None, {"ablate": True}, "--ablate and --prune need parallel text: add --data valid.tsv"),
        ("a", {"ablate": True, "data": ("d",)}, "run on the pairs of --data: leave the sentence out"),
        (None, {"ablate": True, "data": ("d",), "json": "-"}, "run on the pairs of --data: leave --json out"),
        (None, {"ablate": True, "data": ("d",), "head": 0}, "leave --head out"),
        (None, {"layers": (0,)}, "--layers needs a sentence"),
        (None, {"target": "b"}, "--target needs a sentence"),
        (" ", {}, "the sentence must not be empty"),
        ("a", {"head": 0, "png": Path("a.png")}, None),
        (None, {}, None),
    ],
)
def test_flags_that_cannot_be_combined(sentence: str | None, flags: dict[str, Any], problem: str | None) -> None:
    reported = look.find_usage_problem(sentence, look.LookFlags(**flags))
    assert reported is None if problem is None else problem in (reported or "")


# --- other model families ---


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A folder of each model family, and an image."""
    root = tmp_path_factory.mktemp("kin")
    created: dict[str, CausalLM | TextEncoder | VisionTransformer | Seq2Seq] = {
        "gpt": models.causal(),
        "bert": models.encoder(),
        "labels": models.encoder(("good", "bad", "neither")),
        "vit": models.vision(),
        "asr": models.speech(),
        "captioner": models.captioner(),
    }
    for name, item in created.items():
        save_model(item, root / name, None if isinstance(item, VisionTransformer) else models.tokenizer().files)
    return {name: root / name for name in created} | {
        "ring": models.write_ring(root),
        "chirp": models.write_chirp(root),
    }


def make_arguments(family: dict[str, Path], name: str) -> list[str]:
    """Return the arguments: model and input."""
    read = {"gpt": models.TEXT, "bert": models.HIDDEN, "labels": models.TEXT, "vit": str(family["ring"])}
    return ["look", str(family[name]), read[name]]


@pytest.mark.parametrize("name", ["gpt", "bert", "labels", "vit"])
def test_every_family(family: dict[str, Path], name: str) -> None:
    """Page, JSON and figure, with a masked head."""
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    stack = "decoder" if name == "gpt" else "encoder"
    masked = ["--mask", f"{stack}.blocks.1.self_attn:2"]
    assert cli.main([*make_arguments(family, name), "-o", "a.html", "--json", "a.json", "--png", "a.png", *masked]) == 0
    page_data = read_page_data(Path("a.html").read_text(encoding="utf-8"))
    assert page_data == json.loads(Path("a.json").read_text(encoding="utf-8"))
    layers = Inspection.from_json(Path("a.json").read_text(encoding="utf-8")).attention
    assert list(layers) == [f"{stack}.blocks.{i}.self_attn" for i in range(2)]
    assert page_data["layers"][1]["masked_heads"] == [2]  # type: ignore[index]
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("name", "file"), [("asr", "chirp"), ("captioner", "ring")])
def test_models_with_a_front_end(
    family: dict[str, Path], name: str, file: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Page, JSON and figures of a recording or an image."""
    pytest.importorskip("soundfile")
    pytest.importorskip("PIL")
    pytest.importorskip("matplotlib")
    arguments = ["look", str(family[name]), str(family[file]), "--target", "A dog waiting."]
    outputs = ["-o", "a.html", "--json", "a.json", "--png", "a.png", "--svg", "a.svg"]
    assert cli.main([*arguments, *outputs]) == 0
    page_data = read_page_data(Path("a.html").read_text(encoding="utf-8"))
    assert page_data == json.loads(Path("a.json").read_text(encoding="utf-8"))
    assert Path("a.png").read_bytes().startswith(b"\x89PNG")
    assert capsys.readouterr().out.split() == ["a.json", "a.png", "a.svg", "a.html"]
    found = attent.look(family[name], str(family[file]), target="A dog waiting.")
    assert json.loads(found.to_json())["layers"] == page_data["layers"]


def test_one_head_of_an_image(family: dict[str, Path]) -> None:
    pytest.importorskip("matplotlib")
    pytest.importorskip("PIL")
    assert cli.main([*make_arguments(family, "vit"), "--svg", "a.svg", "--layer", "1", "--head", "3"]) == 0
    assert "layer 1, head 3" in Path("a.svg").read_text(encoding="utf-8")


def test_second_text(family: dict[str, Path]) -> None:
    assert cli.main(["look", str(family["bert"]), "a dog", "--text-pair", "two women", "--json", "t.json"]) == 0
    tokens = json.loads(Path("t.json").read_text(encoding="utf-8"))["sides"]["text"]["tokens"]
    assert [token["special"] for token in tokens].count("end") == 2


@pytest.mark.parametrize(
    ("name", "arguments", "words"),
    [
        ("gpt", ["a", "--target", "b"], "--target is for translators, but this is a language model"),
        ("bert", ["a", "--to", "de"], "--to is for translators, but this is a text encoder"),
        ("gpt", ["a", "--data", "x.tsv"], "--data is for translators"),
        ("gpt", ["a", "--text-pair", "b"], "`text_pair` is for text encoders"),
        ("vit", [], "the live page takes text only; name a file: attent look"),
        ("asr", [], "the live page takes text only; name a file: attent look"),
        ("asr", ["A dog."], "A dog.: must be a recording, but does not exist"),
        ("asr", ["a.wav", "--data", "x.tsv"], "--data is for translators, but this is a speech model"),
        ("captioner", ["a.png", "--to", "de"], "has one target language, so --to must be left out"),
        ("vit", ["nowhere.png"], "nowhere.png: must be an image, but cannot be opened"),
        ("gpt", ["a", "--kind", "cross"], "must select an attention layer"),
        ("bert", ["a", "--mask", "decoder.blocks.0"], "did you mean encoder.blocks.0"),
    ],
)
def test_options_of_other_families_are_rejected(
    family: dict[str, Path], capsys: pytest.CaptureFixture[str], name: str, arguments: list[str], words: str
) -> None:
    assert cli.main(["look", str(family[name]), *arguments]) == 1
    assert words in capsys.readouterr().err


def test_ablation_is_for_translators(
    family: dict[str, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.tsv").write_text("a dog\tein Hund\n", encoding="utf-8")
    arguments = ["--ablate", "--data", str(tmp_path / "x.tsv"), "--src", "en", "--tgt", "de"]
    assert cli.main(["look", str(family["gpt"]), *arguments]) == 1
    assert "must be a translator (encoder and decoder), but is a language model" in capsys.readouterr().err


def test_browser_opens_only_with_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(look.webbrowser, "open", opened.append)
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.delenv("DISPLAY", raising=False)
    monkeypatch.delenv("WAYLAND_DISPLAY", raising=False)
    monkeypatch.setattr(look.sys.stderr, "isatty", lambda: True, raising=False)
    look.open_in_browser("file:///look.html")
    assert opened == []
    monkeypatch.setenv("DISPLAY", ":0")
    look.open_in_browser("file:///look.html")
    assert opened == ["file:///look.html"]


def test_browser_needs_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(look.webbrowser, "open", opened.append)
    monkeypatch.setenv("WAYLAND_DISPLAY", "wayland-0")
    monkeypatch.setattr(look.sys.stderr, "isatty", lambda: False, raising=False)
    assert not look.open_in_browser("file:///look.html")
    assert opened == []


def test_status_is_for_terminals_and_warnings_for_all(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for is_terminal in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda value=is_terminal: value, raising=False)
        print_status("measuring")
        look.print_warning("old statistics")
        status = "measuring\n" if is_terminal else ""
        assert capsys.readouterr() == ("", f"{status}warning: old statistics\n")


def test_the_page_to_open_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    opened: list[str] = []

    def open_page(url: str) -> bool:
        opened.append(url)
        return True

    monkeypatch.setattr(look.webbrowser, "open", open_page)
    monkeypatch.setenv("DISPLAY", ":0")
    for flags in ([], ["--no-open"]):
        assert cli.main(["look", str(folder), "A dog.", "--to", "de", "-o", "a.html", *flags]) == 0
        printed = capsys.readouterr()
        assert printed.out == "a.html\n"
        assert ("open a.html in a browser" in printed.err) == bool(flags)
    assert opened == [Path("a.html").resolve().as_uri()]


def test_live_page_gets_the_flags_and_announces_its_address(
    folder_copy: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("granian")
    served: dict[str, Any] = {}
    opened: list[str] = []
    monkeypatch.setattr(look, "open_in_browser", opened.append)
    monkeypatch.setattr("attent.serving.live_page.create_live_app", lambda _, **flags: served.update(flags))
    monkeypatch.setattr("attent.serving.run.serve_app", lambda _, **flags: served.update(flags))
    assert cli.main(["look", str(folder_copy)]) == 0
    assert (served["to"], served["examples"], served["port"]) == (None, [], None)
    write_log(folder_copy / LOG_FILE, "first", "last")
    flags = ["--port", "8123", "--to", "de", "--beam-size", "3"]
    for opening in ("--open", "--no-open"):
        assert cli.main(["look", str(folder_copy), *flags, opening]) == 0
        served.pop("on_ready")("http://127.0.0.1:8123/")
        printed = capsys.readouterr()
        assert printed.out == "http://127.0.0.1:8123/\n"
        assert printed.err.endswith("open it in a browser to inspect toy; stop with Ctrl-C\n")
    assert served == {"to": "de", "beam_size": 3, "examples": ["last"], "port": 8123}
    assert opened == ["http://127.0.0.1:8123/"]


def write_log(path: Path, *sources: str) -> None:
    log = EventLog(path)
    for step, source in enumerate(sources, 1):
        sample = ValidationSample(source=source, reference="", output="")
        log(
            Validated(
                step=step, epoch=1.0, loss=1.0, metrics={}, best=True, validations_since_best=0, seconds=1.0,
                samples=(sample,),
            )
        )  # fmt: skip
    log.close()


def test_ablation_is_printed(folder_copy: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pairs = zip(*lines(4), strict=True)
    Path("valid.tsv").write_text("".join(f"{source}\t{target}\n" for source, target in pairs), encoding="utf-8")
    flags = (
        "--ablate --data valid.tsv --src en --tgt de --to de --parts layers --limit 2 --beam-size 1 --max-bleu-drop 1"
    )
    assert cli.main(["look", str(folder_copy), *flags.split(), "--threads", "1"]) == 0
    out = capsys.readouterr().out
    for text in (
        "pairs       valid.tsv: 2\n",
        "greedy search",
        "on 63 tokens",
        "Without each layer",
        "  not significant\n",
    ):
        assert text in out
    assert "\nOf 4 layers, " in out  # lines are not wrapped


def test_live_page(folder: Path) -> None:
    pytest.importorskip("granian")
    command = [sys.executable, "-m", "attent", "look", str(folder), "--no-open", "--to", "de"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment) as process:
        try:
            assert process.stdout is not None
            address = process.stdout.readline().decode().strip().removeprefix("http://").rstrip("/")
            connection = http.client.HTTPConnection(address, timeout=30)
            connection.request("GET", "/")
            assert read_page_data(connection.getresponse().read().decode())["live"] is True

            def ask(question: dict[str, object]) -> tuple[int, dict[str, object]]:
                connection.request("POST", "/api/look", json.dumps(question), {"Content-Type": "application/json"})
                response = connection.getresponse()
                return response.status, json.loads(response.read())

            status, reply = ask({"text": TEXT})
            assert (status, reply["title"], reply["live"]) == (200, TEXT, True)
            status, quiet = ask({"text": TEXT, "masked_parts": ["decoder.blocks.1"], "beam_size": 2})
            assert status == 200
            assert quiet["sides"] != reply["sides"]
            status, error = ask({"text": TEXT, "masked_parts": ["decoder.blocks.9"]})
            assert (status, "has no part" in str(error["error"])) == (400, True)
            status, error = ask({"text": " "})
            assert (status, "must not be empty" in str(error["error"])) == (400, True)
        finally:
            process.send_signal(signal.SIGINT)
        _, stderr = process.communicate(timeout=20)
    assert b"Traceback" not in stderr
