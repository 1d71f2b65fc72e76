"""Errors that are answered: what they still refer to."""

from __future__ import annotations

from topics_server.values.errors import forget_frames


def test_an_error_and_all_errors_before_it_forget_their_frames() -> None:
    """Errors that were handled on the way refer to frames too, and the last one refers to them."""
    try:
        try:
            try:
                raise KeyError("first")
            except KeyError as first:
                raise ValueError("second") from first
        except ValueError:
            raise RuntimeError("third")  # noqa: B904
    except RuntimeError as third:
        forget_frames(third)
        error: BaseException | None = third
    found = []
    while error is not None:
        found.append((type(error), error.__traceback__))
        error = error.__context__
    assert found == [(RuntimeError, None), (ValueError, None), (KeyError, None)]
