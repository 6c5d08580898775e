"""What puts the load of a level on a server and measures it: one class for tritonserver, one for OpenAI's API."""

from __future__ import annotations

from typing import Protocol

from inflight_client.load_test.results import LevelResult
from inflight_client.load_test.server_facts import ServerFacts
from inflight_client.load_test.sweep import Level


class Load(Protocol):
    def warm_up(self) -> None:
        """Send one request with the longest prompt, so that the first level does not measure a cold server, and that a
        missing server or one that refuses such requests is reported before any load. Raises ClientError."""

    def server_facts(self) -> ServerFacts:
        """What the server says of its engine."""

    def measure(self, level: Level, number: int) -> LevelResult:
        """`number`: of the level in the test; its prompts are its own. Raises LoadTestError."""


class Progress:
    """Callbacks that report the progress of a test. These do nothing; override as needed."""

    def level_started(self, level: Level) -> None:
        """Called before the load of a level starts."""

    def request_ended(self) -> None:
        """Called whenever a request has ended, by loads that notice it before the level is over."""

    def level_finished(self, level: Level, result: LevelResult) -> None:
        """Called with the result of a level."""
