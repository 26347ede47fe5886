"""Models by name, downloaded from a local server that speaks the hub's protocol, each in a process of its own."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save

from attent import cli
from attent.cli.convert import convert
from attent.storage.hub import locate_model
from tests.cli.test_convert import write_seq2seq_folder
from tests.storage.hub_server import COMMIT, FakeHub, serve_hub

pytest.importorskip("huggingface_hub")

REPO = "acme/tiny"
TENSORS = {"a.weight": torch.arange(50_000.0).reshape(250, 200), "b.bias": torch.ones(7)}
CONFIG = json.dumps({"model_type": "marian"}).encode()
PRINT_FOLDER = f"from attent.storage.hub import locate_model; print(locate_model('{REPO}'))"
PRINT_ERROR = """
import sys
from attent.storage.errors import AttentError
from attent.storage.hub import locate_model
for name in sys.argv[1:]:
    try:
        print(locate_model(name))
    except AttentError as error:
        print(error)
"""


@pytest.fixture
def hub() -> Iterator[FakeHub]:
    with serve_hub() as hub:
        hub.repositories[REPO] = {"config.json": CONFIG, "model.safetensors": save(TENSORS), "README.md": b"a card"}
        yield hub


@pytest.fixture
def environment(hub: FakeHub, tmp_path: Path) -> dict[str, str]:
    ours = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "hf"), "ATTENT_CACHE": str(tmp_path / "cache")}
    removed = ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "HF_TOKEN", "TRANSFORMERS_OFFLINE")
    return {name: value for name, value in os.environ.items() if name not in removed} | ours | {"NO_PROXY": "*"}


def run_python(environment: dict[str, str], code: str, *arguments: str) -> str:
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def describe_error(environment: dict[str, str], name: str = REPO) -> str:
    (message,) = describe_errors(environment, name)
    return message


def describe_errors(environment: dict[str, str], *names: str) -> list[str]:
    """Return a message, or a path, of one line for each name."""
    lines = run_python(environment, PRINT_ERROR, *names).splitlines()
    assert len(lines) == len(names)
    return lines


def test_model_is_downloaded_once_and_pinned_to_its_commit(hub: FakeHub, environment: dict[str, str]) -> None:
    folder = Path(run_python(environment, PRINT_FOLDER))
    assert folder.parts[-3:] == ("hub", "acme", f"tiny@{COMMIT}")
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
    assert torch.equal(load_file(folder / "model.safetensors")["a.weight"], TENSORS["a.weight"])
    hub.requests.clear()
    assert run_python(environment | {"HF_HUB_OFFLINE": "1"}, PRINT_FOLDER) == str(folder)
    assert describe_error(environment, f"{REPO}@{COMMIT}") == str(folder)
    assert hub.requests == []


def test_cache_of_huggingface_hub_is_enough(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    """The advice for machines without a network: `hf download` elsewhere, and copy its cache."""
    run_python(environment, f"from huggingface_hub import snapshot_download as download; download('{REPO}')")
    hub.requests.clear()
    folder = Path(run_python(environment | {"HF_HUB_OFFLINE": "1"}, PRINT_FOLDER))
    assert load_file(folder / "model.safetensors").keys() == TENSORS.keys()
    assert hub.requests == []


def test_killed_download_resumes(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.stalled.add("model.safetensors")
    process = subprocess.Popen([sys.executable, "-c", PRINT_FOLDER], env=environment, stderr=subprocess.DEVNULL)
    assert hub.half_sent.wait(60)
    parts: list[Path] = []
    while not parts or parts[0].stat().st_size == 0:  # the first bytes have reached the disk
        parts = list(Path(environment["HF_HOME"]).glob("hub/*/blobs/*.part"))
    process.kill()
    process.wait()
    hub.stalled.clear()
    hub.requests.clear()
    folder = Path(run_python(environment, PRINT_FOLDER))
    assert torch.equal(load_file(folder / "model.safetensors")["a.weight"], TENSORS["a.weight"])
    (sent,) = [(command, span) for command, path, span, _ in hub.requests if "safetensors" in path and span]
    assert sent[0] == "GET"
    assert sent[1] is not None
    assert not sent[1].startswith("bytes=0-")


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_damaged_file_is_refused_and_downloaded_again(name: str, hub: FakeHub, environment: dict[str, str]) -> None:
    hub.damaged.add(name)
    message = describe_error(environment)
    assert "run again" in message
    assert "removed" in message
    assert len(message.splitlines()) == 1
    hub.damaged.clear()
    folder = Path(run_python(environment, PRINT_FOLDER))
    assert (folder / "config.json").read_bytes() == CONFIG


def test_token_is_sent_to_the_hub(hub: FakeHub, environment: dict[str, str]) -> None:
    run_python(environment | {"HF_TOKEN": "hf_secret"}, PRINT_FOLDER)
    tokens = {token for _, path, _, token in hub.requests if REPO in path}
    assert tokens == {"Bearer hf_secret"}


def test_reasons_are_one_sentence(hub: FakeHub, environment: dict[str, str]) -> None:
    hub.gated.add("acme/gated")
    hub.repositories["acme/empty"] = {"README.md": b"nothing"}
    hub.repositories["acme/weightless"] = {"config.json": CONFIG}
    expected = {
        "acme/gated": "request access",
        "acme/absent": "has no model of that name",
        f"{REPO}@v9": "has no revision v9",
        "acme/empty": "has no config.json",
        "acme/weightless": "has neither model.safetensors nor pytorch_model.bin",
    }
    for words, message in zip(expected.values(), describe_errors(environment, *expected), strict=True):
        assert words in message


def test_unreachable_hub_tells_how_to_copy_the_model(hub: FakeHub, environment: dict[str, str]) -> None:
    for changes, reason in (({"HF_ENDPOINT": "http://127.0.0.1:9"}, "refused"), ({"HF_HUB_OFFLINE": "1"}, "is set")):
        message = describe_error(environment | changes)
        assert reason in message
        assert f"`hf download {REPO}`" in message
        assert "models--acme--tiny" in message
        assert len(message.splitlines()) == 1


def test_missing_package_is_named(environment: dict[str, str]) -> None:
    hidden = "import sys; sys.modules['huggingface_hub'] = None\n"
    assert "pip install 'attent[hf]'" in run_python(environment, hidden + PRINT_ERROR, REPO)


def test_commands_take_the_name(
    hub: FakeHub, environment: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hf"
    convert(write_seq2seq_folder(tmp_path), folder, to="hf")
    hub.repositories[REPO] = {path.name: path.read_bytes() for path in folder.iterdir()}

    text, output, converted = tmp_path / "text.txt", tmp_path / "output.txt", tmp_path / "converted"
    text.write_text("the dog sleeps\na cat\n")
    options = [str(text), "--src", "en", "--tgt", "de", "--max-length", "10", "-o", str(output)]
    assert cli.main(["translate", str(folder), *options]) == 0
    expected = output.read_text()
    output.unlink()
    commands = [["translate", REPO, *options], ["convert", REPO, str(converted), "--to", "attent"]]
    run_python(environment, f"from attent import cli; assert not any(map(cli.main, {commands}))")
    assert output.read_text() == expected
    capsys.readouterr()
    assert cli.main(["info", str(converted)]) == 0
    assert f"{REPO}@{COMMIT}" in capsys.readouterr().out.replace("\n", "")


# ---- pickled weights -------------------------------------------------------------------------------------------------


def pickle_tensors(data: object, **options: bool) -> bytes:
    buffer = io.BytesIO()
    torch.save(data, buffer, **options)
    return buffer.getvalue()


def test_pickled_weights_are_converted(hub: FakeHub, environment: dict[str, str]) -> None:
    tied = TENSORS | {"c.weight": TENSORS["a.weight"]}
    for name, is_zip in (("acme/zip", True), ("acme/old", False)):
        content = pickle_tensors(tied, _use_new_zipfile_serialization=is_zip)
        hub.repositories[name] = {"config.json": CONFIG, "pytorch_model.bin": content}
    for folder in map(Path, describe_errors(environment, "acme/zip", "acme/old")):
        assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors"]
        tensors = load_file(folder / "model.safetensors")
        assert {name: tuple(each.shape) for name, each in tensors.items()} == {"a.weight": (250, 200), "b.bias": (7,)}
        assert torch.equal(tensors["a.weight"], TENSORS["a.weight"])


class _Hostile:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self.path),)


def test_hostile_and_damaged_pickles_are_refused(hub: FakeHub, environment: dict[str, str], tmp_path: Path) -> None:
    content = pickle_tensors({"a.weight": _Hostile(tmp_path / "executed")})
    hub.repositories["acme/hostile"] = {"config.json": CONFIG, "pytorch_model.bin": content}
    hub.repositories["acme/damaged"] = {"config.json": CONFIG, "pytorch_model.bin": b"no pickle" * 100}
    hostile, damaged = describe_errors(environment, "acme/hostile", "acme/damaged")
    assert "do not trust it" in hostile
    assert "mkdir" in hostile
    assert not (tmp_path / "executed").exists()
    assert "cannot be converted to safetensors" in damaged


# ---- names and paths -------------------------------------------------------------------------------------------------


def test_path_into_a_folder_is_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs" / "en-de").mkdir(parents=True)
    assert locate_model("runs/en-de") == Path("runs/en-de")
    assert locate_model("runs/en-dee") == Path("runs/en-dee")  # mistyped: the error is about a folder
    assert locate_model("/absent/en-de") == Path("/absent/en-de")
    assert locate_model("absent") == Path("absent")
