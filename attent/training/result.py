"""The result of a training run, as a notebook and a script use it: scores, history, what to type next."""

import html
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from attent.formatting import format_count
from attent.scoring.metrics import format_metrics
from attent.storage.errors import import_package
from attent.training.events import LOG_FILE, Progress, Validated, read_events
from attent.training.loop import StopReason

if TYPE_CHECKING:
    from pandas import DataFrame


@dataclass(frozen=True, kw_only=True)
class TrainResult:
    """How a run ended. `stopped`: by a signal or `should_stop`; training the same folder again resumes it."""

    out: Path
    step: int
    stop_reason: StopReason
    scores: tuple[Mapping[str, Any], ...] = ()  # of a complete run, per set: name, split, num_examples, unit, metrics
    exit_code: int = 0  # as a shell expects it: 130 or 143 after a signal
    resume_command: str = ""  # if it was stopped
    python_example: str = ""  # of using the model, if it is complete

    @property
    def history(self) -> list[dict[str, Any]]:
        """A dict per reported step: step, epoch, loss, lr ...; of validations also valid_loss and the metrics."""
        rows: dict[int, dict[str, Any]] = {}
        for event in read_events(self.out / LOG_FILE):
            if isinstance(event, Progress):
                known = {name: value for name, value in asdict(event).items() if value is not None}
                rows.setdefault(event.step, {}).update(known)
            elif isinstance(event, Validated):
                scores = {"step": event.step, "epoch": event.epoch, "valid_loss": event.loss, **event.metrics}
                rows.setdefault(event.step, {}).update(scores)
        return [rows[step] for step in sorted(rows)]

    def to_frame(self) -> "DataFrame":
        """`history` as a pandas data frame with the step as its index."""
        frame: DataFrame = import_package("pandas", "`to_frame`", "pandas").DataFrame(self.history or {"step": []})
        return frame.set_index("step")

    def __repr__(self) -> str:
        return "\n".join([*self._describe(), "", self._next_code])

    def _repr_html_(self) -> str:
        lines = "<br>".join(map(html.escape, self._describe()))
        return f'<div>{lines}</div><pre style="font-family: monospace">{html.escape(self._next_code)}</pre>'

    def _describe(self) -> Iterator[str]:
        ending = "stopped after" if self.stop_reason == "stopped" else "trained for"
        yield f"{self.out}: {ending} {format_count(self.step, 'step')}"
        for scores in self.scores:
            yield f"{scores['split']} {Path(scores['name']).name}: {format_metrics(scores['metrics'])}"

    @property
    def _next_code(self) -> str:
        resume = f"attent.train(out={str(self.out)!r})  # resumes the run"
        return self.python_example.removeprefix("import attent\n\n") or resume
