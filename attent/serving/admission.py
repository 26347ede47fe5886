"""Admit requests: API keys, a rate limit per client, and a bounded queue that no client can fill alone."""

from __future__ import annotations

import hmac
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from attent.serving.limits import ApiError, Limits

MAX_KNOWN_CLIENTS = 10_000  # whose rate is remembered
SPEED_HALF_LIFE = 10.0  # seconds of work after which a measured speed counts half
MAX_RETRY_AFTER = 60.0  # seconds
MIN_MEASURED_SECONDS = 0.5  # of work, before the speed is known


class Admission:
    """Counts what each client sends and waits for."""

    def __init__(self, limits: Limits, keys: frozenset[str] = frozenset()) -> None:
        """Without `keys`, everybody is admitted."""
        self._limits = limits
        self._keys = keys
        self._tokens: OrderedDict[str, tuple[float, float]] = OrderedDict()  # client -> requests left, at which time
        self._pending: Counter[str] = Counter()  # client -> characters of its pending requests
        self._counts: Counter[str] = Counter()  # client -> pending requests
        self.num_pending = 0
        self._busy_since = 0.0
        self._busy_seconds = 0.0
        self._done_characters = 0.0

    def identify(self, address: str, key: str) -> str:
        """Return the client of a request: its key, or its address; raise 403 for a wrong key."""
        if not self._keys:
            return address
        if not key:
            raise ApiError(403, "an API key is required; send it as `api_key`, or in the header Authorization")
        if not any(hmac.compare_digest(key.encode(), known.encode()) for known in self._keys):
            raise ApiError(403, "the API key is not valid")
        return f"key {key}"

    def check_rate(self, client: str) -> None:
        """Count a request; raise 429 if the client sent too many in the last minute."""
        per_minute = self._limits.requests_per_minute
        if not per_minute:
            return
        now = time.monotonic()
        left, since = self._tokens.pop(client, (float(per_minute), now))
        left = min(per_minute, left + (now - since) * per_minute / 60)
        self._tokens[client] = (left - 1 if left >= 1 else left, now)
        if len(self._tokens) > MAX_KNOWN_CLIENTS:
            self._tokens.popitem(last=False)
        if left < 1:
            raise make_limit_error(f"more than {per_minute} requests in a minute", 60 * (1 - left) / per_minute)

    @contextmanager
    def admit(self, client: str, characters: int) -> Iterator[None]:
        """Hold a place in the queue; raise 503 if it is full, or 429 if it is full of this client's requests."""
        self._check_queue(client, characters)
        if not self.num_pending:
            self._busy_since = time.monotonic()
        self.num_pending += 1
        self._counts[client] += 1
        self._pending[client] += characters
        try:
            yield
            self._done_characters += characters
        finally:
            self.num_pending -= 1
            self._counts[client] -= 1
            self._pending[client] -= characters
            if not self._counts[client]:
                del self._counts[client], self._pending[client]
            self._measure_speed()

    def _check_queue(self, client: str, characters: int) -> None:
        """A client with waiting requests gets at most its share of what the others leave free."""
        share, is_waiting = self._limits.max_client_share, client in self._pending
        own = self._compute_load(self._counts[client] + 1, self._pending[client] + characters)
        others = self._compute_load(
            self.num_pending - self._counts[client], self._pending.total() - self._pending[client]
        )
        retry_after = min(MAX_RETRY_AFTER, (own + others - 1) * self._limits.max_queue_seconds)
        if is_waiting and share < 1 and own > share * (1 - others):
            raise make_limit_error("your requests fill your share of the queue", retry_after)
        if self.num_pending and own + others > 1:
            raise make_limit_error("the server is busy", retry_after, status=503)

    def _compute_load(self, requests: int, characters: int) -> float:
        """Return the share of the queue that these requests fill, by their number and by the seconds they take."""
        speed = self.characters_per_second
        seconds = characters / speed if speed else 0.0
        return max(seconds / self._limits.max_queue_seconds, requests / (1 + self._limits.max_queued))

    @property
    def characters_per_second(self) -> float | None:
        """The speed of the last seconds of work; None: not known yet."""
        return self._done_characters / self._busy_seconds if self._busy_seconds > MIN_MEASURED_SECONDS else None

    def _measure_speed(self) -> None:
        now = time.monotonic()
        seconds, self._busy_since = now - self._busy_since, now
        self._busy_seconds += seconds
        decay = 0.5 ** (seconds / SPEED_HALF_LIFE)
        self._busy_seconds *= decay
        self._done_characters *= decay


def make_limit_error(problem: str, retry_after: float, status: int = 429) -> ApiError:
    seconds = max(1, math.ceil(retry_after - 1e-6))
    return ApiError(status, f"{problem}; retry later", {"retry-after": str(seconds)})
