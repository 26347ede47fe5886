"""Language identification by character n-grams: is a text in its language, or in another one that is known?

An identifier has for each language the log-probability of hashed n-grams of one to four letters. It is learned from the
training text of a model, in whose folder it is stored (16 KB per language), or from the names in CLDR (by Babel) for
corpora before training. Callers warn; nothing is decided by it. Error rates are in docs/log.md (Languages).
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Self

import numpy as np
import safetensors
import safetensors.numpy

from attent.text.language_tags import get_primary_subtag, is_same_language, normalize_tag
from attent.text.scripts import get_language_scripts

Array = np.ndarray[Any, np.dtype[Any]]

LANGUAGES_FILE = "languages.safetensors"  # of a model folder
MAX_ORDER = 4
NUM_BUCKETS = 2**13
SMOOTHING = 0.5  # added to each count
MAX_LEARNED_CHARS = 2_000_000  # per language
MIN_LEARNED_CHARS = 2_000  # fewer are no profile of a language
MIN_CHARS = 20  # letters and spaces of a line that can be judged by itself; shorter lines are judged together
MIN_MARGIN = 0.2  # nats per n-gram, from which on a line is in another language
MIN_SHARE = 0.2  # of the lines; with fewer, there is no warning
MAX_EXAMPLES = 3
CLDR_MARGIN = 0.1  # names are not sentences: true translations are 0.07 to 0.6 on the right side
MAX_EVIDENCE = 40
MIN_CONFIDENCE = 0.01  # less likely languages are not reported
COMMON_LANGUAGES = tuple("cs de en es fr it nl pl pt ru sv tr".split())  # compared with, besides those of the model
COMMON_SCRIPTS = frozenset({"Latn", "Cyrl", "Grek"})  # elsewhere, Latin names and commands among the text mislead
MIN_COMMON_CHARS = 400
MIN_COMMON_SHARE = 0.8  # of the lines
MAX_SURPRISE = 1.0  # nats per n-gram, beyond which a text is detected as a language that was not learned
MIN_SURPRISE = 0.5  # nats per n-gram; text of another domain has 0.1 to 0.9, of another language 0.6 to 2.5
CLDR_TABLES = ("languages", "territories", "scripts", "variants", "currency_names", "date_fields", "months", "days")

_WORD = re.compile(r"[^\W\d_]+")


@dataclass(frozen=True)
class LanguageMismatch:
    language: str  # of most of them
    count: int
    total: int  # lines that could be judged
    examples: tuple[str, ...]

    def __str__(self) -> str:
        quoted = ", ".join(f"\u201c{text[:60]}{'…' if len(text) > 60 else ''}\u201d" for text in self.examples)
        return f"{self.count:,} of {self.total:,} lines look like {self.language} (such as {quoted})"


@dataclass(frozen=True)
class LanguageIdentifier:
    sources: tuple[str, ...]  # language tags
    targets: tuple[str, ...]
    log_probs: Mapping[str, Array]  # language -> (NUM_BUCKETS,)

    @classmethod
    def learn(cls, sources: Mapping[str, Iterable[str]], targets: Mapping[str, Iterable[str]]) -> Self:
        counts: dict[str, Array] = {}
        for tag, texts in (*sources.items(), *targets.items()):
            hashes = _hash_ngrams(_limit_length(texts))[0]
            counts[tag] = counts.get(tag, 0) + np.bincount(hashes, minlength=NUM_BUCKETS)
        known = {tag: count for tag, count in counts.items() if count.sum() >= MAX_ORDER * MIN_LEARNED_CHARS}
        log_probs = {tag: np.log((count + SMOOTHING) / (count + SMOOTHING).sum()) for tag, count in known.items()}
        return cls(
            tuple(tag for tag in sources if tag in known), tuple(tag for tag in targets if tag in known), log_probs
        )

    def to_bytes(self) -> bytes:
        sides = {"source": self.sources, "target": self.targets}
        names = {f"{side}.{tag}": tag for side, tags in sides.items() for tag in tags}
        return safetensors.numpy.save({name: self.log_probs[tag].astype("<f2") for name, tag in names.items()})

    @classmethod
    def from_bytes(cls, content: bytes) -> "LanguageIdentifier | None":
        """Return the identifier of a file; None if it is of another version."""
        try:
            tables = safetensors.numpy.load(content)
        except safetensors.SafetensorError:
            return None
        names = [(*name.partition("."), table) for name, table in tables.items() if table.shape == (NUM_BUCKETS,)]
        sides = {side: tuple(tag for name, _, tag, _ in names if name == side) for side in ("source", "target")}
        return cls(sides["source"], sides["target"], {tag: table.astype("<f4") for _, _, tag, table in names})

    @classmethod
    def merge(cls, identifiers: "Sequence[LanguageIdentifier]") -> Self:
        """Return one identifier of all languages; one that several know is taken from the first."""
        log_probs = {tag: table for each in reversed(identifiers) for tag, table in each.log_probs.items()}
        sources = dict.fromkeys(tag for each in identifiers for tag in each.sources)
        targets = dict.fromkeys(tag for each in identifiers for tag in each.targets)
        return cls(tuple(sources), tuple(targets), log_probs)

    def rank(self, text: str) -> list[tuple[str, float]]:
        """Return all languages with their probability; a text counts as at most `MAX_EVIDENCE` dependent n-grams."""
        tags = list(self.log_probs)
        if not tags:
            return []
        count = max(1, len(_hash_ngrams([text])[0]))
        scores = self._score([text], tags)[:, 0] * min(count, MAX_EVIDENCE)
        probs = np.exp(scores - scores.max())
        return sorted(zip(tags, (probs / probs.sum()).tolist(), strict=True), key=lambda pair: -pair[1])

    def find_mismatch(self, texts: Sequence[str], expected: Collection[str]) -> LanguageMismatch | None:
        """Return the lines that are in another language than the expected ones, if they are not few."""
        known = self._find_known_language(texts, expected)
        return self._find_common_language(texts, [*expected, *([known.language] if known else [])]) or known

    def _find_known_language(self, texts: Sequence[str], expected: Collection[str]) -> LanguageMismatch | None:
        others = [tag for tag in self.log_probs if tag not in expected]
        own = [tag for tag in expected if tag in self.log_probs]
        if not others or not own:
            return None
        lengths = np.array([sum(map(len, _WORD.findall(text))) for text in texts])
        lines = [text for text, length in zip(texts, lengths, strict=True) if length >= MIN_CHARS]
        joined = [" ".join(texts)] if not lines and lengths.sum() >= MIN_CHARS else []
        scores = self._score(lines or joined, [*own, *others])
        margins = scores[len(own) :].max(0) - scores[: len(own)].max(0)
        is_other = margins > MIN_MARGIN
        if not is_other.any() or is_other.mean() <= MIN_SHARE:
            return None
        languages = Counter(others[i] for i in scores[len(own) :].argmax(0)[is_other].tolist())
        if joined:
            lines = [text for text, length in zip(texts, lengths, strict=True) if length]
            is_other, margins = np.ones(len(lines), dtype=bool), lengths[lengths > 0]  # the longest as examples
        clearest = np.argsort(-margins, kind="stable")[: min(MAX_EXAMPLES, int(is_other.sum()))]
        examples = tuple(lines[i].strip() for i in clearest.tolist())
        return LanguageMismatch(languages.most_common(1)[0][0], int(is_other.sum()), len(lines), examples)

    def _find_common_language(self, texts: Sequence[str], expected: Collection[str]) -> LanguageMismatch | None:
        """Compare with languages that were not learned, by the names in CLDR; only long texts that are improbable."""
        own = tuple(tag for tag in expected if tag in self.log_probs)
        lines = [text for text in texts if sum(map(len, _WORD.findall(text))) >= MIN_CHARS]
        if not own or sum(map(len, lines)) < MIN_COMMON_CHARS or self._measure_surprise(lines, own) < MIN_SURPRISE:
            return None
        others = tuple(
            tag for tag in COMMON_LANGUAGES if not any(is_same_language(tag, known) for known in self.log_probs)
        )
        names = _load_cldr_identifier(own, others)
        if names is None or not all(COMMON_SCRIPTS & (get_language_scripts(tag) or frozenset()) for tag in own):
            return None
        scores = names._score([" ".join(lines), *lines], [*own, *others])
        best = int(scores[len(own) :, 0].argmax())
        margin, *margins = (scores[len(own) + best] - scores[: len(own)].max(0)).tolist()
        count = sum(value > 0 for value in margins)
        if margin <= CLDR_MARGIN or count <= MIN_COMMON_SHARE * len(lines):
            return None
        clearest = sorted(range(len(lines)), key=lambda i: -margins[i])[:MAX_EXAMPLES]
        return LanguageMismatch(others[best], count, len(lines), tuple(lines[i].strip() for i in clearest))

    def _measure_surprise(self, texts: Sequence[str], tags: Sequence[str]) -> float:
        scores = self._score([" ".join(texts)], tags)[:, 0]
        negative_entropies = (float((np.exp(self.log_probs[tag]) * self.log_probs[tag]).sum()) for tag in tags)
        return min(expected - score for expected, score in zip(negative_entropies, scores.tolist(), strict=True))

    def _score(self, texts: Sequence[str], tags: Sequence[str]) -> Array:
        """Return (languages, texts): the mean log-probability of the n-grams of each text."""
        hashes, lines = _hash_ngrams(texts)
        counts = np.maximum(np.bincount(lines, minlength=len(texts)), 1)
        sums = [np.bincount(lines, weights=self.log_probs[tag][hashes], minlength=len(texts)) for tag in tags]
        return np.stack(sums) / counts

    def measure_margin(self, texts: Sequence[str], expected: str, other: str) -> float:
        """Return by how much the texts as a whole are more probable in another language, in nats per n-gram."""
        scores = self._score([" ".join(texts)], [expected, other])
        return float(scores[1, 0] - scores[0, 0])


def _limit_length(texts: Iterable[str]) -> list[str]:
    selected, length = [], 0
    for text in texts:
        selected.append(text)
        length += len(text)
        if length >= MAX_LEARNED_CHARS:
            break
    return selected


def _hash_ngrams(texts: Sequence[str]) -> tuple[Array, Array]:
    """Return the bucket and the line of each n-gram: of the words in lower case, with a space around each."""
    folded = "\n".join(f" {' '.join(_WORD.findall(text.lower()))} " for text in texts)
    codes = np.frombuffer(folded.encode("utf-32-le", "surrogatepass"), "<u4").astype(np.uint64)
    is_newline, is_space = codes == ord("\n"), codes == ord(" ")
    line = np.cumsum(is_newline)
    keys, buckets, lines = np.zeros(len(codes), np.uint64), [], []
    last_newline = np.maximum.accumulate(np.where(is_newline, np.arange(len(codes)), -1))
    for order in range(1, MAX_ORDER + 1):  # n-grams that end at each character
        shifted = np.concatenate([np.zeros(order - 1, np.uint64), codes[: len(codes) - order + 1]])[: len(codes)]
        keys = keys * np.uint64(0x9E3779B97F4A7C15) + shifted
        is_whole = np.arange(len(codes)) - last_newline >= order
        is_whole &= ~is_newline if order > 1 else ~(is_newline | is_space)
        mixed = (keys[is_whole] ^ (keys[is_whole] >> np.uint64(29))) * np.uint64(0xBF58476D1CE4E5B9)
        buckets.append((mixed >> np.uint64(40)) % np.uint64(NUM_BUCKETS))
        lines.append(line[is_whole])
    return np.concatenate(buckets).astype(np.int64), np.concatenate(lines)


# ---- detection -------------------------------------------------------------------------------------------------------


def detect_language(text: str, identifier: LanguageIdentifier, candidates: Sequence[str]) -> list[tuple[str, float]]:
    """Return the likely languages of a text with their confidence, best first.

    The identifier decides between the languages that it has learned. py3langid (97 languages; extra `serve`), where it
    is installed, decides between the other candidates, and for texts that look like none of the learned languages.
    """
    own = identifier.rank(text)
    tags = [tag for tag, _ in own]
    is_known = bool(own) and (len(text) < MIN_CHARS or identifier._measure_surprise([text], tags) < MAX_SURPRISE)
    others = [tag for tag in candidates if tag not in tags]
    if is_known and not others:
        return own
    library = _load_library()
    if library is None:
        return own or [(tag, 1 / len(candidates)) for tag in candidates]
    general = [(str(tag), float(probability)) for tag, probability in library.rank(text)]
    learned = {get_primary_subtag(tag) for tag in tags}
    share = sum(probability for tag, probability in general if tag in learned)
    if is_known:
        share = max(share, 1 - sum(probability for tag, probability in general if tag in others))
    ranked = [(tag, probability * share) for tag, probability in own]
    ranked += [
        (tag, probability) for tag, probability in general if tag not in learned and (not is_known or tag in others)
    ]
    total = sum(probability for _, probability in ranked) or 1.0
    likely = [(tag, probability / total) for tag, probability in ranked if probability > MIN_CONFIDENCE * total]
    return sorted(likely, key=lambda pair: -pair[1])


@lru_cache(maxsize=1)
def _load_library() -> Any:
    try:
        from py3langid import langid  # type: ignore[import-untyped]
    except ModuleNotFoundError:
        return None
    return langid.LanguageIdentifier.from_model_file(langid.MODEL_FILE, norm_probs=True)


# ---- corpora without a model -----------------------------------------------------------------------------------------


def find_wrong_sides(sources: Sequence[str], targets: Sequence[str], source: str, target: str) -> tuple[bool, bool]:
    """Return which sides look like the language of the other side, by the names in CLDR; both: they are swapped."""
    identifier = _load_cldr_identifier((source,), (target,))
    if identifier is None:
        return False, False
    sides = ((sources, source, target), (targets, target, source))
    margins = [identifier.measure_margin(*side) for side in sides]
    if sum(margins) > 2 * CLDR_MARGIN:  # what one profile has in general more than the other cancels out
        return True, True
    return margins[0] > CLDR_MARGIN, margins[1] > CLDR_MARGIN


@lru_cache(maxsize=8)
def _load_cldr_identifier(sources: tuple[str, ...], targets: tuple[str, ...]) -> LanguageIdentifier | None:
    names = {tag: _list_cldr_names(tag) for tag in (*sources, *targets)}
    identifier = LanguageIdentifier.learn(
        {tag: names[tag] for tag in sources}, {tag: names[tag] for tag in targets if tag not in sources}
    )
    return identifier if len(identifier.log_probs) == len(names) else None


def _list_cldr_names(tag: str) -> list[str]:
    """Return the names of languages, countries, currencies, months and so on in a language; none if unknown."""
    from babel.core import Locale, UnknownLocaleError, get_global

    language, *rest = normalize_tag(tag).split("-")
    language = str(get_global("language_aliases").get(language, language)).partition("_")[0]
    try:
        locale = Locale.parse("_".join([language, *rest]))
    except (UnknownLocaleError, ValueError):
        return []
    names: list[str] = []
    tables: list[object] = [getattr(locale, name, None) or locale._data.get(name) for name in CLDR_TABLES]
    while tables:
        table = tables.pop()
        if isinstance(table, str):
            names.append(table)
        elif hasattr(table, "values"):
            tables += list(table.values())
    return names
