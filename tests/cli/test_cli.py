"""The `attent` command: help without importing torch, error messages and exit codes."""

import shlex
import subprocess
import sys
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

import attent
from attent import cli
from attent.cli import doctor
from attent.cli.classify import ClassifyFlags
from attent.cli.data import DataFlags
from attent.cli.embed import EmbedFlags
from attent.cli.fill import FillFlags
from attent.cli.generate import GenerateFlags
from attent.cli.look import LookFlags
from attent.cli.score import ScoreFlags
from attent.cli.translate import TranslateFlags
from attent.decoding.options import DeviceOptions, SamplingOptions, SearchOptions
from attent.formatting import format_count

ROOT = Path(attent.__file__).parent.parent

TORCH_PACKAGE = doctor.Package("torch", "", ">=2.11", "2.13.0+cpu")


def attent_command(arguments: list[str], before: str = "") -> subprocess.CompletedProcess[str]:
    """Run the command in a new process, where nothing is imported yet."""
    code = f"import sys\n{before}\nfrom attent.cli import main\nsys.exit(main({arguments!r}))"
    return subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)


# ---- help and version --------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], [], ["no-such-command"]])
def test_help_and_version_do_not_import_torch(arguments: list[str]) -> None:
    report = "import atexit\natexit.register(lambda: print('LOADED', 'torch' in sys.modules))"
    assert "LOADED False" in attent_command(arguments, report).stdout


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--help"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


def test_version_is_the_package_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.strip() == attent.__version__


def test_python_m_runs_the_same_command() -> None:
    command = [sys.executable, "-m", "attent", "--version"]
    assert subprocess.check_output(command, cwd=ROOT, text=True).strip() == attent.__version__


# ---- flags ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("command", cli.COMMANDS)
def test_only_switches_that_can_be_on_have_a_negative(command: str) -> None:
    arguments = cli.make_app()[command].assemble_argument_collection()
    names = {name for argument in arguments for name in argument.names if name.startswith(("--no-", "--empty-"))}
    switches = {"--no-compile", "--no-keep-adapter", "--no-shard", "--no-tags"}
    expected: dict[str, set[str]] = {
        "compare": switches, "distil": switches, "train": {*switches, "--no-mono-sampling"},
        "generate": {"--no-echo"}, "look": {"--no-open"},
        **{name: {"--no-repeat-ngram-size"} for name in ("caption", "transcribe")},
        **{name: {"--no-repeat-ngram-size", "--no-prevent-loops"} for name in ("score", "translate")},
    }  # fmt: skip
    assert names == expected.get(command, set())


@pytest.mark.parametrize("command", ["translate", "score", "generate"])
def test_flags_have_the_groups_aliases_and_help_of_their_options(command: str) -> None:
    arguments = {name: item for item in cli.make_app()[command].assemble_argument_collection() for name in item.names}
    options = [field for kind in (SearchOptions, SamplingOptions, DeviceOptions) for field in fields(kind)]
    described = [field for field in options if "option" in field.metadata]
    assert len(described) > 12
    for field in described:
        argument, option = arguments.get(f"--{field.name.replace('_', '-')}"), field.metadata["option"]
        if argument is None or command == "generate" or field.name in ("beam_size", "n_best", "device", "dtype"):
            continue
        assert [group.name for group in argument.parameter.group] == [option.group]
        assert argument.parameter.help == option.help
        assert {*option.aliases} <= {*argument.names}


def test_flags_that_are_set_by_default() -> None:
    search = {
        "n_best": 1,
        "length_penalty": 0.6,
        "length_penalty_type": "avg",
        "beam_groups": 1,
        "diversity_penalty": 0.5,
        "prevent_loops": True,
    }
    expected: dict[type, dict[str, object]] = {
        TranslateFlags: {**search, "output_type": "text", "input_type": "auto"},
        ScoreFlags: {**search, "metrics": ("bleu", "chrf", "ter"), "worst": 5},
        LookFlags: {"beam_size": 4, "open": True, "parts": "heads", "max_bleu_drop": 0.2, "dtype": "float32"},
        GenerateFlags: {"echo": True},
        ClassifyFlags: {"dtype": "float32", "top": 1},
        EmbedFlags: {"dtype": "float32", "pooling": "mean"},
        FillFlags: {"dtype": "float32", "top": 5},
        DataFlags: {},
    }
    for kind, values in expected.items():
        assert {field.name: field.default for field in fields(kind) if field.default} == values  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "rewritten"),
    [
        ("data -", "data -"),
        ("translate M -", "translate M ./-"),
        ("translate -", "translate ./-"),
        ("translate M -- -", "translate M -- -"),
        ("translate M a.txt -o -", "translate M a.txt --output=-"),
        ("translate M -o a.txt -", "translate M -o a.txt ./-"),
        ("translate M - --output - --beam-size 3", "translate M ./- --output=- --beam-size 3"),
        ("score M --data -", "score M --data=-"),
        ("score M --data - --src en", "score M --data=- --src en"),
        ("score M --src en -", "score M --src en -"),
        ("-", "-"),
        ("", ""),
    ],
)
def test_a_dash_is_rewritten_for_the_parser(given: str, rewritten: str) -> None:
    assert cli._rewrite_stdin_args(given.split()) == rewritten.split()


# ---- failing commands -----------------------------------------------------------------------------------


@pytest.fixture
def failing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Add a command `fail` whose body is written by the test."""
    monkeypatch.setattr(cli, "__path__", [*cli.__path__, str(tmp_path)])
    monkeypatch.setitem(cli.COMMANDS, "fail", "Fails.")
    monkeypatch.delitem(sys.modules, "attent.cli.fail", raising=False)
    monkeypatch.delenv("ATTENT_TRACEBACK", raising=False)
    return tmp_path / "fail.py"


def write_command(path: Path, body: str, head: str = "") -> None:
    path.write_text(f"{head}\ndef fail() -> None:\n    {body}\n")


@pytest.mark.parametrize(
    ("body", "code", "expected"),
    [
        (
            "raise ValueError('`beam_size` must be 1 or more, but is 0')",
            1,
            "error: `beam_size` must be 1 or more",
        ),
        ("open('no/such/file.tsv')", 1, "error: no/such/file.tsv: No such file or directory"),
        ("raise OSError(28, 'No space left on device')", 1, "error: No space left on device"),
        ("raise KeyboardInterrupt", 130, "attent: interrupted"),
        ("raise ModuleNotFoundError(name='granian.server')", 1, "pip install 'attent[serve]'"),
    ],
)
def test_failure_is_one_sentence(
    failing: Path, body: str, code: int, expected: str, capsys: pytest.CaptureFixture[str]
) -> None:
    write_command(failing, body)
    assert cli.main(["fail"]) == code
    output = capsys.readouterr()
    assert expected in output.err
    assert len(output.err.splitlines()) == 1
    assert "Traceback" not in output.err


def test_missing_package_is_named(failing: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_command(failing, "pass", head="raise ModuleNotFoundError(name='granian')")
    assert cli.main(["fail"]) == 1
    assert "pip install 'attent[serve]'" in capsys.readouterr().err


def test_bug_keeps_its_traceback(failing: Path) -> None:
    write_command(failing, "[][0]")
    with pytest.raises(IndexError):
        cli.main(["fail"])


def test_traceback_can_be_requested(failing: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ATTENT_TRACEBACK", "1")
    write_command(failing, "raise ValueError('wrong')")
    with pytest.raises(ValueError, match="wrong"):
        cli.main(["fail"])


def test_command_may_return_an_exit_code(failing: Path) -> None:
    write_command(failing, "return 1")
    assert cli.main(["fail"]) == 1


@pytest.mark.parametrize("arguments", ["--help", "doctor"])
def test_closed_pipe_is_silent(arguments: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m attent {arguments} | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.parametrize(
    ("closed", "arguments", "code", "expected"),
    [
        (">&-", "--version", 1, "attent: error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        (">&-", "translate M", 1, "attent: error: standard output is closed; redirect it to a file, or to /dev/null\n"),
        ("<&-", "--version", 0, ""),
        ("<&-", "data -", 1, "attent: error: standard input is closed; redirect it from a file, or "),
        ("2>&-", "nonsense", 2, ""),
        ("<&- >&- 2>&-", "--help", 1, ""),
    ],
)
def test_closed_standard_streams_are_reported(closed: str, arguments: str, code: int, expected: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m attent {arguments} {closed}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.startswith(expected)
    assert len(done.stderr.splitlines()) == bool(expected)


def test_files_do_not_take_the_numbers_of_closed_streams(tmp_path: Path) -> None:
    """A message on a closed stderr would otherwise be written into the next file that is opened."""
    code = "import sys; from attent import cli; cli.main(['nonsense']); print(open(sys.argv[1], 'w').fileno())"
    command = shlex.join([sys.executable, "-c", code, str(tmp_path / "file")]) + " <&- 2>&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) > 2


# ---- doctor ------------------------------------------------------------------------------------------------


def test_doctor_ends_with_its_verdict(capsys: pytest.CaptureFixture[str]) -> None:
    code = cli.main(["doctor"])
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1].startswith("ready: " if code == 0 else "not ready: ")
    assert any(line.startswith("torch ") for line in lines)


def test_every_extra_of_users_is_listed() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert tuple(name for name in extras if name not in ("all", "dev", "docs")) == doctor.EXTRAS


def render(result: doctor.Examination, *packages: doctor.Package) -> list[str]:
    return [line.plain for line in doctor.render_report(result, packages)]


def test_doctor_reports_packages_and_problems() -> None:
    old, missing = doctor.Package("pillow", "images", ">=12", "11.0"), doctor.Package("ray", "ray", ">=2", None)
    result = doctor.Examination([("attent", "1.0")], device="CPU, 2 threads, float32")
    doctor.check_packages(result, (TORCH_PACKAGE, old, missing))
    lines = render(result, TORCH_PACKAGE, old, missing)
    assert lines[:3] == ["attent     1.0", "", "core    torch   2.13.0+cpu"]
    assert lines[3:5] == ["images  pillow  11.0, not >=12", "ray     ray     pip install 'attent[ray]'"]
    assert lines[-1] == "ready: CPU, 2 threads, float32"
    doctor.check_packages(result, (doctor.Package("torch", "", ">=2.11", "2.9.1"),))
    assert render(result)[-1] == "not ready: torch is 2.9.1, but must be >=2.11: pip install 'torch>=2.11'"


def test_the_processor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "read_text", lambda path: "processor: 0\nmodel name\t: A   fast  CPU\nmodel name: B")
    assert doctor.get_processor_name() == "A fast CPU"
    monkeypatch.setattr(doctor, "read_text", lambda path: "")
    for processor, kind, expected in (("x86", "arm", "x86"), ("", "arm", "arm"), ("", "", "unknown")):
        monkeypatch.setattr(doctor.platform, "processor", lambda value=processor: value)
        monkeypatch.setattr(doctor.platform, "machine", lambda value=kind: value)
        assert doctor.get_processor_name() == expected


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_torch_and_its_devices(monkeypatch: pytest.MonkeyPatch, precision: str) -> None:
    import torch

    monkeypatch.setattr("attent.training.hardware.pick_precision", lambda device: precision)
    result = doctor.Examination()
    doctor.check_torch(result, has_driver=True)
    assert "this torch is a CPU build" in result.advice[0]
    assert result.device == f"CPU, {format_count(torch.get_num_threads(), 'thread')}, {precision}"
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    doctor.check_torch(result, has_driver=True)
    assert result.advice[1] == "torch is built for CUDA 13.0 but sees no GPU: check the driver with nvidia-smi"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: ((1 + index) * 2**30, 2 * 2**30))
    monkeypatch.setattr(torch.cuda, "get_device_name", "GPU {}".format)
    doctor.check_torch(result, has_driver=True)
    assert len(result.advice) == 2
    assert ("device 0", "GPU 0 (cuda), 1.0 GiB free of 2.0 GiB") in result.rows
    assert result.device == f"GPU 0, {precision}"


def test_requirements_of_other_pythons_and_extras_are_ignored() -> None:
    assert doctor.parse_requirement("backports.zstd>=1; python_version < '3.99'") is not None
    assert doctor.parse_requirement("backports.zstd>=1; python_version < '3.5'") is None
    assert doctor.parse_requirement("ruff>=1; extra == 'dev'") is None


# ---- system info -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("version", "required", "fits"),
    [
        ("2.13.0+cpu", ">=2.11", True),
        ("2.9.1", ">=2.11", False),
        ("2.11", ">=2.11.0", True),
        ("6.0.0", ">=5,<6", False),
        ("5.4.0", "<6,>=5", True),
        ("2.16.0.dev20261101", ">=2.11", True),
        ("1.0", "", True),
    ],
)
def test_versions_are_compared_by_number(version: str, required: str, fits: bool) -> None:
    assert doctor.Package("x", "", required, version).is_compatible is fits


def test_requirements_are_read_with_their_extra() -> None:
    package = doctor.parse_requirement("huggingface_hub[cli]<3,>=2; extra == 'hf'")
    assert package is not None
    assert (package.name, package.extra, package.required) == ("huggingface-hub", "hf", "<3,>=2")
