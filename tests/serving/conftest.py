"""A fake model and its server."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.serving.toy import Client, Model, Switch, start_test_server


@pytest.fixture
def model() -> Iterator[Model]:
    model = Model()
    yield model
    model.let_go.set()  # end its thread


@pytest.fixture(scope="module")
def shared() -> Iterator[tuple[Switch, Client]]:
    switch = Switch()
    with start_test_server(switch) as client:
        yield switch, client


@pytest.fixture
def client(model: Model, shared: tuple[Switch, Client]) -> Client:
    """One server for the tests of a file, each with a model of its own."""
    switch, client = shared
    switch.model = model
    return client
