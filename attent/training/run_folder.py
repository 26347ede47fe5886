"""The folder of a run, which belongs to one run and to one process at a time: file names, checks, lock."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from attent import settings
from attent.models.folder import CONFIG_FILE, WEIGHTS_FILE
from attent.storage.atomic import NEW_SUFFIX, is_temporary
from attent.storage.cache import try_hold_lock
from attent.storage.manifest import MANIFEST_FILE, explain_save_errors
from attent.text.tokenizer import TOKENIZER_FORMATS
from attent.training import checkpoint
from attent.training.config import RESUMABLE_CHANGES, UserSettings, diff_settings, merge_with_previous, read_run
from attent.training.event_log import LOG_FILE
from attent.training.run_options import TrainError

RUN_FILE, CURVES_FILE, CARD_FILE, STATE_FOLDER = "run.toml", "curves.svg", "card.md", "state"
REQUESTED_FILE, FINISHED_FILE, NEW_HEADS_FILE = "requested.json", "finished.json", "new_heads.json"  # in state/
MODEL_FILES = {CONFIG_FILE, WEIGHTS_FILE, MANIFEST_FILE}
RUN_FILES = MODEL_FILES | {RUN_FILE, CARD_FILE, LOG_FILE}
# Files that a run may have written before its first checkpoint.
EARLY_FILES = {RUN_FILE, LOG_FILE, CURVES_FILE} | {
    name for layout in TOKENIZER_FORMATS for name in (*layout.required_files, *layout.optional_files)
}
MAX_LISTED_CHANGES = 8


def check_folder(out: Path, requested: UserSettings) -> None:
    if out.exists() and not out.is_dir():
        raise TrainError(f"{out}: must be a folder, but is a file; give another --out")
    state = out / STATE_FOLDER
    is_run = (state / REQUESTED_FILE).exists()
    has_checkpoint = bool(checkpoint.list_steps(state))
    files = [path for path in out.iterdir() if not is_temporary(path)] if out.is_dir() else []
    names = {path.name.removesuffix(NEW_SUFFIX) for path in files}
    if is_run and (names & MODEL_FILES or has_checkpoint):
        check_changes(out, settings.read_json(state / REQUESTED_FILE), requested)
    elif names - {STATE_FOLDER} - (EARLY_FILES if is_run else set()) or has_checkpoint:
        has_model = bool(names & RUN_FILES)
        content = "a model" if has_model else f"other files ({', '.join(sorted(names)[:3])})"
        advice = f", or fine-tune the model with --from {out}" if has_model else ""
        raise TrainError(f"{out}: contains {content}, which is not overwritten; give another --out{advice}")
    elif not is_run and not names_data(requested):
        raise TrainError("there is no training data; name a corpus with --data, such as --data corpus.tsv")
    with explain_save_errors(out, "run"):
        state.mkdir(parents=True, exist_ok=True)
        probe = state / ".probe"
        probe.write_bytes(b"")
        probe.unlink()


def names_data(requested: UserSettings) -> bool:
    """True if the settings name training data: a corpus, or text to translate."""
    data = requested.get("data", {})
    synthetic = data.get("synthetic", {})
    return any((data.get("train"), synthetic.get("mono_target"), synthetic.get("mono_source")))


def check_changes(out: Path, previous: UserSettings, requested: UserSettings) -> None:
    resolved = settings.to_dict(read_run(out / RUN_FILE)) if (out / RUN_FILE).exists() else {}
    changes = diff_settings(previous, merge_with_previous(requested, previous, resolved))
    rejected = [
        f"{path}: {_format_value(old)} -> {_format_value(new)}"
        for path, (old, new) in sorted(changes.items())
        if path not in RESUMABLE_CHANGES
    ]
    if rejected:
        more = len(rejected) - MAX_LISTED_CHANGES
        listed = "; ".join(rejected[:MAX_LISTED_CHANGES]) + (f"; and {more} more" if more > 0 else "")
        raise TrainError(
            f"{out}: contains a run with other settings ({listed}); resume with the original settings, "
            "or give another --out for a new run"
        )


def _format_value(value: Any) -> str:
    return "(not set)" if value is None else json.dumps(value, ensure_ascii=False)


@contextmanager
def lock_folder(out: Path) -> Iterator[None]:
    with try_hold_lock(out / STATE_FOLDER / ".lock") as held:
        if not held:
            raise TrainError(f"{out}: is in use by another training process; wait for it, or give another --out")
        yield
