"""Parallel text in memory (pairs, dicts, tables with named columns), stored as JSON Lines for the corpus readers."""

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from attent.data.formats.jsonl import ROLE_KEYS
from attent.data.pairs import CorpusError
from attent.storage.atomic import atomic_path
from attent.text.language_tags import choose_tag


class TextTable(Protocol):
    """A pandas or polars DataFrame, or a `datasets.Dataset`."""

    @property
    def shape(self) -> Any: ...

    def __getitem__(self, column: Any, /) -> Any: ...


CorpusInput = str | Path | Sequence[str | Path] | Sequence[tuple[str, str]] | Sequence[Mapping[str, str]] | TextTable


def is_in_memory(data: Any) -> bool:
    """False for the names of files, folders and built-in corpora."""
    names = [data] if isinstance(data, str | Path) else data
    return not (isinstance(names, Sequence) and all(isinstance(name, str | Path) for name in names))


class InMemoryCorpus:
    """Pairs or a table, of the argument `argument` of a function; `languages` are those that the function is given."""

    def __init__(self, data: Any, argument: str, languages: Sequence[str | None]) -> None:
        self.data, self.argument = data, argument
        self.languages = [tag.strip() for tags in languages if tags for tag in tags.split(",")]
        if isinstance(data, Mapping) or not hasattr(data, "__len__"):
            names = ", ".join(map(str, data)) if isinstance(data, Mapping) else ""
            advice = f"give one of {names}, or a list of pairs (source, target)" if names else "make a list of it"
            raise self._error(f"must be files, pairs or a table, but is of type {type(data).__name__}", advice)
        digest = hashlib.sha256()
        for line in self._iterate_lines():
            digest.update(line)
        self.name = f"{digest.hexdigest()[:12]}-{argument}.jsonl"  # of the file: another text has another name

    def write(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_path(path) as temporary, open(temporary, "wb") as file:
            file.writelines(self._iterate_lines())

    def _error(self, problem: str, advice: str) -> CorpusError:
        return CorpusError(f"`{self.argument}` {problem}; {advice}")

    def _iterate_lines(self) -> Iterator[bytes]:
        for index, row in enumerate(self._iterate_rows()):
            for name, text in row.items():
                if not isinstance(text, str):
                    problem = f"must be text, but row {index:,} (from 0) has {text!r} as {name}"
                    raise self._error(problem, "remove the row")
            # A lone surrogate cannot be UTF-8; Python's escape for it is also JSON's, and the reader drops the pair.
            yield (json.dumps(row, ensure_ascii=False) + "\n").encode(errors="backslashreplace")

    def _iterate_rows(self) -> Iterator[dict[str, Any]]:
        """Yield each row with the keys that the reader of JSON Lines knows: languages, or "src" and "tgt"."""
        names = getattr(self.data, "column_names", getattr(self.data, "columns", None))  # of datasets, of pandas
        columns = None if names is None else list(names)
        if columns is not None and "translation" not in columns:
            keys = self._choose_columns(columns)
            for texts in zip(*(self.data[column] for column in keys.values()), strict=True):
                yield dict(zip(keys, texts, strict=True))
            return
        for index, row in enumerate(self.data if columns is None else self.data["translation"]):
            if isinstance(row, Mapping):
                yield {key: row[column] for key, column in self._choose_columns(list(row)).items()}
            elif isinstance(row, tuple | list) and len(row) == 2:
                yield dict(zip(ROLE_KEYS[0], row, strict=True))
            else:
                problem = f"must have pairs (source, target), but row {index:,} (from 0) is {row!r}"
                raise self._error(problem, "correct the row")

    def _choose_columns(self, columns: Sequence[Any]) -> dict[str, Any]:
        """Return the columns of the texts, by the keys of `_iterate_rows`."""
        by_name = {str(column): column for column in columns}
        tags = [choose_tag(language, list(by_name)) for language in self.languages]
        if len(tags) > 1 and all(tags):
            return {tag: by_name[tag] for tag in tags if tag}
        if len(columns) == 2:
            return by_name if any(tags) or not tags else dict(zip(ROLE_KEYS[0], columns, strict=True))
        expected = f"the columns {' and '.join(self.languages)}" if len(tags) > 1 else "exactly two columns"
        raise self._error(f"must have {expected}, but has {', '.join(by_name)}", "rename or select them")
