"""The description under requests made up from it: §0.5, §0.6 (schemathesis)."""

from __future__ import annotations

import pytest

from tests.contract import described
from tests.contract.conftest import NewServer
from tests.contract.fuzzing import IMPATIENT, fuzzing


@pytest.mark.connection(
    "mounted",
    reason="a mount of Starlette matches no path with a line break, and some have one",
)
@pytest.mark.timeout(300)
def test_answers_to_made_up_requests_are_as_described(own: NewServer) -> None:
    server = own(**IMPATIENT)
    server.start()
    with fuzzing(server) as fuzz:
        fuzz.round(seed=1, examples=12)
        assert fuzz.sent > 500
        # The other operations are always refused, because they name generated sessions, leases and
        # sockets that do not exist.
        succeeded = {label for label, status in fuzz.statuses if status < 300}
        assert len(succeeded) >= 20, sorted(succeeded)
    server.stop()


def test_every_status_of_the_envelope_is_described() -> None:
    for path, item in described.document()["paths"].items():
        for method, operation in item.items():
            if method != "parameters":
                statuses = {int(status) for status in operation["responses"]}
                assert statuses & {101, 200, 204}, f"{method} {path}"
                assert 500 in statuses, f"{method} {path}"
