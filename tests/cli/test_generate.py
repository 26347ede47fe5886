"""`attent generate`: streamed text, one line per prompt, JSON, error messages."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import attent
from attent import cli
from attent.cli.generate import GenerateFlags, find_usage_error
from attent.decoding.generation.generator import Generator
from attent.decoding.options import GenerationOptions
from attent.models.weights import save_model
from tests.decoding.toy_generators import PROMPTS, llama, save_model_folder, sentencepiece_tokenizer
from tests.training.toys import model as translator

Capture = pytest.CaptureFixture[str]


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model_folder(tmp_path_factory.mktemp("author") / "model")


def set_stdin(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(text.encode())))


def run(capsys: Capture, *arguments: Any) -> tuple[int, str, str]:
    code = cli.main(["generate", *map(str, arguments)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_a_prompt_is_continued(model_folder: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, model_folder, "A man", "--max-new-tokens", 8, "--seed", 3, "--device", "cpu")
    whole = Generator.load(model_folder, device="cpu").generate(["A man"], max_new_tokens=8, seed=3)[0][0]
    assert (code, out, err) == (0, f"A man{whole.text}\n", "")
    code, out, _ = run(capsys, model_folder, "A man", "-l", 8, "--seed", 3, "--no-echo")
    assert out == f"{whole.text}\n"


def test_a_random_seed_is_printed(model_folder: Path, capsys: Capture) -> None:
    code, out, err = run(capsys, model_folder, "A man", "-l", 8)
    seed = err.removeprefix("attent: sampled with --seed ").partition(";")[0]
    assert code == 0
    assert run(capsys, model_folder, "A man", "-l", 8, "--seed", seed) == (0, out, "")
    assert run(capsys, model_folder, "A man", "-l", 4, "--temperature", 0)[2] == ""


def test_one_line_per_prompt(model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "\n".join(PROMPTS) + "\n")
    code, out, _ = run(capsys, model_folder, "--temperature", 0, "-l", 6)
    lines = out.split("\n")
    assert code == 0
    assert len(lines) == len(PROMPTS) + 1
    assert all(line.startswith(prompt) for line, prompt in zip(lines, PROMPTS, strict=False))


def test_a_dash_means_standard_input(model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    set_stdin(monkeypatch, "A man\n")
    code, out, _ = run(capsys, model_folder, "-", "-t", 0, "-l", 3)
    assert code == 0
    assert out.startswith("A man")


def test_lines_before_a_too_long_prompt_are_written(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_stdin(monkeypatch, f"A man\nx\n{'x' * 70}\nA dog\n")
    code, out, err = run(capsys, model_folder, "-t", 0, "-l", 3)
    assert code == 1
    assert [line[:1] for line in out.splitlines()] == ["A", "x"]
    assert "standard input, line 3: must have at most the model's 60 tokens, but has" in err


def test_the_memory_error_names_the_flag(capsys: Capture, tmp_path: Path) -> None:
    save_model(llama(sentencepiece_tokenizer()), tmp_path / "model", sentencepiece_tokenizer().files)
    code, _, err = run(capsys, tmp_path / "model", "A man", "-l", 10**12)
    assert code == 1
    assert "`--max-new-tokens` must be small enough for one text" in err


def test_json_fields(model_folder: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS), encoding="utf-8")
    code, out, _ = run(
        capsys, model_folder, "--file", tmp_path / "prompts.txt", "--json", "-n", 2, "-l", 6, "--seed", 5
    )
    facts = [json.loads(line) for line in out.splitlines()]
    whole = Generator.load(model_folder, device="cpu").generate(
        PROMPTS, GenerationOptions(n=2, max_new_tokens=6, seed=5)
    )
    assert code == 0
    assert [
        (sample["prompt"], sample["text"], tuple(sample["token_ids"]), sample["finish_reason"]) for sample in facts
    ] == [
        (sample.prompt, sample.text, sample.token_ids, sample.finish_reason) for samples in whole for sample in samples
    ]
    assert {sample["seed"] for sample in facts} == {5}


def test_several_texts_are_separated(model_folder: Path, capsys: Capture) -> None:
    code, out, _ = run(capsys, model_folder, "A man", "-n", 2, "-l", 4, "--stop", "q", "--stop", "zz")
    assert code == 0
    assert out.count("A man") == 2
    assert "\n---\n" in out


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["A", "--device", "tpu"], 1, "device tpu"),
        (["--file", "nowhere.txt"], 1, "nowhere.txt: must be a text file"),
        (["x" * 70, "-l", "4"], 1, "error: the prompt must have at most the model's 60 tokens"),
        (["caf\udce9"], 2, "the prompt must be UTF-8, but byte 4 is not"),
    ],
)
def test_an_unusable_prompt_is_reported(
    model_folder: Path, capsys: Capture, arguments: list[str], code: int, words: str
) -> None:
    exit_code, out, err = run(capsys, model_folder, *arguments)
    assert (exit_code, out) == (code, "")
    assert words in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("flags", "problem"),
    [
        ({"temperature": 0.5, "seed": 2}, None),
        ({"temperature": 0}, None),
        ({"temperature": 0, "top_k": 1}, "--top-k is for sampling, but --temperature 0"),
    ],
)
def test_flags_without_effect_are_named(flags: dict[str, Any], problem: str | None) -> None:
    found = find_usage_error(None, GenerateFlags(**flags))
    assert found is None if problem is None else found is not None and found.startswith(problem)


def test_a_missing_prompt_is_reported_on_a_terminal(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    code, _, err = run(capsys, model_folder)
    assert code == 1
    assert "there must be a prompt" in err


def test_a_translator_is_rejected_with_the_right_command(capsys: Capture, tmp_path: Path) -> None:
    save_model(translator(), tmp_path / "model", sentencepiece_tokenizer().files)
    code, _, err = run(capsys, tmp_path / "model", "A man")
    assert code == 1
    assert "must be a language model (decoder only), but is a translator" in err
    assert "attent translate" in err


def test_translate_rejects_a_language_model(model_folder: Path, capsys: Capture) -> None:
    assert cli.main(["translate", str(model_folder)]) == 1
    assert "must be a translator (encoder and decoder), but is a language model" in capsys.readouterr().err


def test_streamed_text_stays_when_interrupted(
    model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stream_then_interrupt(self: Generator, prompt: str, options: GenerationOptions) -> Any:
        yield " one"
        yield " two"
        raise KeyboardInterrupt

    monkeypatch.setattr(Generator, "stream", stream_then_interrupt)
    assert run(capsys, model_folder, "A man", "--seed", 1) == (130, "A man one two\n", "attent: interrupted\n")


def test_an_empty_file_is_reported(model_folder: Path, capsys: Capture, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_bytes(b"")
    code, out, error = run(capsys, model_folder, "--file", tmp_path / "empty.txt", "--temperature", "0")
    assert (code, out) == (0, "")
    assert error == f"attent: {tmp_path / 'empty.txt'}: is empty, there is nothing to continue\n"


def test_device_flags_reach_the_generator(model_folder: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = list[Generator]()
    load = Generator.load

    def keep_loaded(*arguments: Any, **options: Any) -> Generator:
        loaded.append(load(*arguments, **options))
        return loaded[-1]

    monkeypatch.setattr(Generator, "load", keep_loaded)
    threads = list[int]()
    monkeypatch.setattr("torch.set_num_threads", threads.append)
    flags = ["--dtype", "bfloat16", "--device", "cpu", "--max-new-tokens", "1"]
    assert run(capsys, model_folder, "The", *flags, "--threads", "3")[0] == 0
    assert next(loaded[0].model.parameters()).dtype == torch.bfloat16
    assert threads == [3]
    code, _, error = run(capsys, model_folder, "The", "--threads", "0")
    assert (code, "--threads must be 1 or more, but is 0" in error) == (2, True)


def test_help_does_not_import_torch() -> None:
    code = (
        "import sys; from attent import cli; code = cli.main(['generate', '--help']); "
        "sys.exit(code or 'torch' in sys.modules)"
    )
    process = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert process.returncode == 0
    assert "--max-new-tokens" in process.stdout


def test_generator_is_public() -> None:
    assert attent.Generator is Generator
