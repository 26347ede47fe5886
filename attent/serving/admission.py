"""Admit requests: API keys, a rate limit per client, and a bounded queue that no client can fill alone."""

import hmac
import math
import time
from collections import Counter, OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager

from attent.serving.limits import ApiError, Limits

MAX_KNOWN_CLIENTS = 10_000  # whose rate is remembered
BUSY_REQUESTS = 8  # from this number of pending requests on, the speed is measured
SPEED_HALF_LIFE = 10.0  # seconds of work after which a measured speed counts half
MAX_RETRY_AFTER = 60.0  # seconds
MIN_MEASURED_SECONDS = 5.0  # of work, before the speed is known: batches finish all at once


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
        self._last_change = 0.0
        self._busy_seconds = 0.0  # of times with at least `BUSY_REQUESTS` pending requests
        self._done_characters = 0.0  # in these times
        self._has_answered = False  # before the first answer, kernels are compiled

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
        """Hold a place in the queue; raise 503 if it is full, or 429 if the client fills its share of it."""
        self._check_queue(client, characters)
        self._measure_speed(0)
        self.num_pending += 1
        self._counts[client] += 1
        self._pending[client] += characters
        try:
            yield
        finally:
            self._measure_speed(characters)
            self.num_pending -= 1
            self._counts[client] -= 1
            self._pending[client] -= characters
            if not self._counts[client]:
                del self._counts[client], self._pending[client]

    def _check_queue(self, client: str, characters: int) -> None:
        """A client without pending requests is admitted while there is a place; others get a share of the rest."""
        if self.num_pending > self._limits.max_queued:
            raise make_limit_error("the server is busy", 1.0, status=503)
        own_count, own_characters = self._counts[client], self._pending[client]
        own = self._compute_load(own_count + 1, own_characters + characters)
        others = self._compute_load(self.num_pending - own_count, self._pending.total() - own_characters)
        share = self._limits.max_client_share
        if own_count and share < 1 and own > share * max(0.0, 1 - others):
            retry_after = (own + others - share) * self._limits.max_queue_seconds
            raise make_limit_error("your requests fill your share of the queue", min(MAX_RETRY_AFTER, retry_after))

    def _compute_load(self, requests: int, characters: int) -> float:
        """Return the share of the queue that these requests fill, by their number and by the seconds they take."""
        speed = self.characters_per_second
        seconds = characters / speed if speed else 0.0
        return max(seconds / self._limits.max_queue_seconds, requests / (1 + self._limits.max_queued))

    @property
    def characters_per_second(self) -> float | None:
        """The speed when many requests share batches; None: not known yet. With few requests it would be lower."""
        return self._done_characters / self._busy_seconds if self._busy_seconds > MIN_MEASURED_SECONDS else None

    def _measure_speed(self, done_characters: int) -> None:
        now = time.monotonic()
        seconds, self._last_change = now - self._last_change, now
        if self.num_pending >= BUSY_REQUESTS and self._has_answered:
            decay = 0.5 ** (seconds / SPEED_HALF_LIFE)
            self._busy_seconds = decay * (self._busy_seconds + seconds)
            self._done_characters = decay * (self._done_characters + done_characters)
        self._has_answered |= done_characters > 0


def make_limit_error(problem: str, retry_after: float, status: int = 429) -> ApiError:
    seconds = max(1, math.ceil(retry_after - 1e-6))
    return ApiError(status, f"{problem}; retry later", {"retry-after": str(seconds)})
