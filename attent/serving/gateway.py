"""The gateway between the HTTP endpoints and the models: admission, cache, limits and metrics of every request."""

import logging
import secrets
import time
from collections import OrderedDict
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from starlette.requests import Request

from attent.serving.admission import MAX_KNOWN_CLIENTS, Admission
from attent.serving.backend import Method, ModelBackend
from attent.serving.limits import LOCAL_HOSTS, ApiError, Limits, get_header
from attent.serving.messages import DEFAULT_BEAMS, FileRequest, TextTranslation, TranslateRequest

CACHED_CHARACTERS = 4_000_000  # of sources and translations, by default
STORED_BYTES = 64 * 2**20  # of translated files, and as many of glossaries
ITEM_BYTES = 1_000  # that a stored item takes besides its content
FILE_SECONDS = 1_800.0  # that a translated file can be downloaded
MAX_PHRASE_CHARACTERS = 500  # of all required phrases, of all banned ones, and of a translation in a glossary
LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)

log = logging.getLogger("attent.serving")


@dataclass(frozen=True, kw_only=True)
class ServerOptions:
    """How a server treats its clients."""

    limits: Limits = Limits(max_queued=256, response_timeout=30.0, body_timeout=8.0)  # noqa: RUF009 - frozen
    keys: frozenset[str] = frozenset()  # API keys; none: everybody may use it
    hosts: tuple[str, ...] = LOCAL_HOSTS  # accepted host names; "*": any
    origins: tuple[str, ...] = ()  # other websites whose scripts may use it; "*": any
    cached_characters: int = CACHED_CHARACTERS
    trust_proxy: bool = False  # take a client's address from the header X-Forwarded-For
    log_text: bool = False  # log the texts that are translated
    suggestions: Path | None = None  # file that gets the translations that users suggest
    drain_timeout: float = 30.0  # seconds that running requests get when the server stops


class Metrics:
    def __init__(self, admission: Admission) -> None:
        self.registry = CollectorRegistry()
        options: Any = {"registry": self.registry}
        self.requests = Counter("attent_requests", "HTTP requests by path and status", ["path", "status"], **options)
        help_text = "Time until the response is complete"
        self.seconds = Histogram("attent_request_seconds", help_text, ["path"], buckets=LATENCY_BUCKETS, **options)
        self.characters = Counter("attent_characters", "Characters translated", **options)
        self.cache_hits = Counter("attent_cache_hits", "Texts answered from the cache", **options)
        pending = Gauge("attent_pending_requests", "Requests that wait for a model", **options)
        pending.set_function(lambda: admission.num_pending)


class TranslationCache:
    """The translations that were used last, by text and options."""

    def __init__(self, max_characters: int) -> None:
        self._max_characters = max_characters
        self._entries: OrderedDict[tuple[int, TranslateRequest], TextTranslation] = OrderedDict()
        self._characters = 0

    def get(self, version: int, request: TranslateRequest) -> TextTranslation | None:
        key = (version, request)
        if key in self._entries:
            self._entries.move_to_end(key)
        return self._entries.get(key)

    def add(self, version: int, request: TranslateRequest, translation: TextTranslation) -> None:
        size = len(repr(request)) + len(repr(translation))
        if size > self._max_characters or (version, request) in self._entries:
            return
        self._entries[version, request] = translation
        self._characters += size
        while self._characters > self._max_characters:
            (_, old_request), old = self._entries.popitem(last=False)
            self._characters -= len(repr(old_request)) + len(repr(old))


class ItemStore:
    """Items of clients under unguessable names. If there are too many bytes, the oldest are removed."""

    def __init__(self, max_bytes: int, max_seconds: float = float("inf")) -> None:
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._items: dict[str, tuple[str, int, float, Any]] = {}  # name -> client, bytes, end, item; oldest first
        self._num_bytes = 0

    def add(self, client: str, item: Any, size: int, suffix: str = "") -> str:
        name, now = secrets.token_urlsafe(24) + suffix, time.monotonic()
        self._items[name] = (client, size + ITEM_BYTES, now + self._max_seconds, item)
        self._num_bytes += size + ITEM_BYTES
        while self._items and (self._num_bytes > self._max_bytes or next(iter(self._items.values()))[2] < now):
            self.remove(next(iter(self._items)))
        return name

    def remove(self, name: str) -> None:
        self._num_bytes -= self._items.pop(name)[1]

    def get(self, client: str, name: str) -> Any:
        owner, _, end, item = self._items.get(name, ("", 0, 0.0, None))
        return item if owner == client and end > time.monotonic() else None

    def list_items(self, client: str) -> dict[str, Any]:
        return {name: item for name, (owner, _, _, item) in self._items.items() if owner == client}


class Gateway:
    """Identifies clients and passes their requests to the models."""

    def __init__(self, backend: ModelBackend, options: ServerOptions) -> None:
        self.backend = backend
        self.options = options
        self.limits = limits = options.limits
        self.needs_key = bool(options.keys)
        self.admission = Admission(limits, options.keys)
        # A file takes minutes, so that it would spoil the measured speed; its sentences take turns with other clients'.
        self.file_admission = Admission(replace(limits, max_queued=limits.max_files - 1, max_queue_seconds=1e9))
        self.metrics = Metrics(self.admission)
        self._cache = TranslationCache(options.cached_characters)
        self.files = ItemStore(max(STORED_BYTES, 4 * limits.max_file_bytes), FILE_SECONDS)
        self.glossaries = ItemStore(STORED_BYTES)
        self.used_characters: dict[str, int] = {}  # client -> characters of its texts

    def identify(self, request: Request, key: str, *, is_public: bool, key_status: int) -> str:
        """Return the client of a request, and count the request; raise `key_status` for a wrong key, or 429."""
        address = request.client.host if request.client else ""
        if self.options.trust_proxy:
            address = get_header(request.scope, "x-forwarded-for").rpartition(",")[2].strip() or address
        if is_public:
            return address
        try:
            client = self.admission.identify(address, key)
        except ApiError as error:
            self.admission.check_rate(f"without a key: {address}")
            raise ApiError(key_status, str(error)) from None
        self.admission.check_rate(client)
        return client

    def build_url(self, request: Request, path: str) -> str:
        """Return the address of a path as the client sees this server."""
        is_https = self.options.trust_proxy and request.headers.get("x-forwarded-proto") == "https"
        return str(request.base_url.replace(path=path, scheme="https" if is_https else request.url.scheme))

    async def translate(self, request: TranslateRequest, client: str) -> list[TextTranslation]:
        """Translate texts; those that are in the cache are not searched again."""
        self.check_sizes(request)
        if self.options.log_text:
            log.info("translate from %s to %s: %r", request.source, request.target, request.texts)
        self.used_characters[client] = self.used_characters.get(client, 0) + sum(map(len, request.texts))
        if len(self.used_characters) > MAX_KNOWN_CLIENTS:
            del self.used_characters[next(iter(self.used_characters))]
        version = self.backend.version
        single = [replace(request, texts=(text,)) for text in request.texts]
        use_cache = request.search.sampling is None  # samples depend on the place of a text in the request
        results = [self._cache.get(version, each) if use_cache else None for each in single]
        missing = [index for index, result in enumerate(results) if result is None]
        self.metrics.cache_hits.inc(len(results) - len(missing))
        if missing:
            rest = replace(request, texts=tuple(request.texts[index] for index in missing))
            searched = await self.call("translate", rest, client, characters=count_characters(rest))
            for index, translation in zip(missing, searched, strict=True):
                results[index] = translation
                if use_cache:
                    self._cache.add(version, single[index], translation)
        return [result for result in results if result is not None]

    async def translate_file(self, request: FileRequest, client: str) -> AsyncIterator[float | bytes]:
        """Yield the share that is translated, again and again, and finally the translated file."""
        with self.file_admission.admit(client, 1):
            async for item in self.backend.stream("translate_file", request, client):
                yield item

    async def call(self, method: Method, request: Any, client: str, *, characters: int) -> Any:
        """Run a method of the service; `characters` is the amount of work."""
        (result,) = [item async for item in self.stream(method, request, client, characters=characters)]
        return result

    async def stream(self, method: Method, request: Any, client: str, *, characters: int) -> AsyncIterator[Any]:
        with self.admission.admit(client, characters):
            async for item in self.backend.stream(method, request, client):
                yield item
        self.metrics.characters.inc(characters)

    def check_sizes(self, request: TranslateRequest) -> None:
        limits, search, beams = self.limits, request.search, min(request.num_beams, self.limits.max_beam_size)
        characters, max_characters = sum(map(len, request.texts)), limits.max_characters * DEFAULT_BEAMS // beams
        if len(request.texts) > limits.max_texts:
            raise ApiError(413, f"a request must have at most {limits.max_texts} texts, but has {len(request.texts)}")
        if characters > max_characters:
            advice = f"; with fewer beams or samples than {beams}, it may have more" * (beams > DEFAULT_BEAMS)
            raise ApiError(
                413, f"a request must have at most {max_characters} characters, but has {characters}{advice}"
            )
        constraints = request.constraints
        bounds = {
            "beam_size": (search.beam_size, limits.max_beam_size),
            "n_best": (search.n_best, limits.max_beam_size),
            "mbr_candidates": (request.mbr_candidates, limits.max_beam_size),
            "max_length": (search.max_length or 0, limits.max_tokens),
            "min_length": (search.min_length, min(limits.max_tokens, limits.max_search_tokens // beams)),
            "prefix": (len(constraints.prefix), limits.max_characters),
            "require": (sum(map(len, constraints.require)), MAX_PHRASE_CHARACTERS),
            "ban": (sum(map(len, constraints.ban)), MAX_PHRASE_CHARACTERS),
            "glossary": (max((len(text) for _, text in request.glossary), default=0), MAX_PHRASE_CHARACTERS),
        }
        for name, (value, maximum) in bounds.items():
            if value > maximum:
                unit = " characters" if name in ("prefix", "require", "ban", "glossary") else ""
                raise ApiError(400, f"`{name}` must be at most {maximum}{unit}, but is {value:.6g}")
        if any("\0" in text for text in request.texts):
            raise ApiError(400, "the text contains a NUL character; remove it")


def count_characters(request: TranslateRequest) -> int:
    """Return the amount of work: the characters, times the beams relative to the default."""
    characters = sum(map(len, request.texts)) + 4 * request.search.min_length
    return round(characters * request.num_beams / DEFAULT_BEAMS) + 1
