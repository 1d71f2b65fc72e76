"""`./run bench-check`: what it finds, what it measures again, and what it refuses."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pytest

from benchmarks import check
from benchmarks.cases.registry import STORE_CASES
from benchmarks.clients.loader import BenchmarkError, Sample
from benchmarks.report.figures import Figure, Series
from benchmarks.report.floor_ratios import (
    ABOVE_MAX,
    MARGIN,
    FileProblem,
    Kept,
    Known,
    holds,
    known_ratios,
    parse_file,
    row_problems,
    spelled_file,
    verdict,
)
from benchmarks.report.machine import describe
from benchmarks.servers import floor
from benchmarks.servers.process import Reply

KEPT = {
    "append-1: append of one record, 1 connection": 0.8,
    "append-1: append of one record, 16 connections": 0.7,
    "append-100: append of 100 records, 1 connection": 0.35,
    "diff-1000: diff of 1,000 records, 1 connection": 1.0,
}
FIRST, SECOND, HUNDRED, PAGE = KEPT


def kept_on(processor: str, ratios: Mapping[str, float]) -> dict[str, list[Kept]]:
    """What is kept on a machine with this processor: each ratio in the case that its row names."""
    cases: dict[str, dict[str, float]] = {}
    for row, ratio in ratios.items():
        cases.setdefault(row.partition(": ")[0], {})[row] = ratio
    machine = {"processor": processor}
    return {case: [Kept(machine, {}, rows)] for case, rows in cases.items()}


def lowest(cases: Mapping[str, list[Kept]], processor: str = "any") -> dict[str, float]:
    """The lowest of the ratios that count for each row."""
    return {row: known.lowest for row, known in known_ratios(cases, processor).items()}


def spelled(ratios: Mapping[str, float]) -> str:
    """A file that keeps these ratios, on a machine with some processor."""
    return spelled_file(kept_on("Some", ratios))


class Server:
    """Stands for the measured server: each try of a case has its own share of the kept ratios."""

    def __init__(self, shares: Mapping[str, Sequence[float]], rows: Mapping[str, float]) -> None:
        self.tries: list[str] = []
        self._shares = shares
        self._rows = rows

    def __call__(self, case: str) -> dict[str, float]:
        turn = self.tries.count(case)
        self.tries.append(case)
        found = {}
        for row, ratio in self._rows.items():
            if row.startswith(case + ": "):
                shares = self._shares.get(row, (1.0,))
                found[row] = ratio * shares[min(turn, len(shares) - 1)]
        return found


@pytest.fixture
def run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, list[str], Server]]:
    """Compare with `KEPT`; returns the exit code, the printed lines and the server."""

    def compare(
        shares: Mapping[str, Sequence[float]] | None = None,
        rows: Mapping[str, float] = KEPT,
        text: str | None = None,
    ) -> tuple[int, list[str], Server]:
        path = tmp_path / "kept.json"
        path.write_text(spelled(KEPT) if text is None else text)
        server = Server(shares or {}, rows)
        code = check.main(["--kept", str(path)], server)
        return code, capsys.readouterr().out.splitlines(), server

    return compare


def samples(*latencies: float) -> list[Sample]:
    """Rounds of these median latencies."""
    return [Sample(1, 1.0, 1.0, p50, p50, p50, p50, 0.0) for p50 in latencies]


Run = Callable[..., tuple[int, list[str], Server]]


# -- judging -------------------------------------------------------------------------------------


def test_an_equal_server_passes_with_a_line_for_each_row(run: Run) -> None:
    code, lines, server = run()
    assert code == 0
    assert [line[:5] for line in lines] == ["ok   "] * len(KEPT) + ["bench"]
    assert lines[-1] == "bench-check: passed"
    assert server.tries == list(check.CASES)


def test_less_than_half_of_the_rate_fails_in_its_row_only(run: Run) -> None:
    code, lines, _ = run({HUNDRED: (0.4,)})
    assert code == 1
    failed = [line for line in lines if line.startswith("FAIL")]
    assert failed == [
        f"FAIL {HUNDRED}: ratio to the floor 0.140, kept 0.350, passes from 0.175 to 1.050"
    ]
    assert lines[-1] == "bench-check: 1 failed"


@pytest.mark.parametrize("row", KEPT)
def test_each_row_can_fail(run: Run, row: str) -> None:
    assert run({row: (MARGIN - 0.01,)})[0] == 1
    assert run({row: (MARGIN + 0.01,)})[0] == 0


def test_a_server_of_less_than_half_the_rate_fails_in_every_row(run: Run) -> None:
    code, lines, _ = run(dict.fromkeys(KEPT, (0.4, 0.45, 0.49)))
    assert code == 1
    assert sum(line.startswith("FAIL") for line in lines) == len(KEPT)


@pytest.mark.parametrize("row", KEPT)
def test_a_ratio_that_is_far_too_high_fails(run: Run, row: str) -> None:
    """The floor has become slow, or the row compares something else: each server would pass."""
    code, lines, _ = run({row: (ABOVE_MAX + 0.01, ABOVE_MAX + 3.0)})
    assert code == 1
    high = (ABOVE_MAX + 0.01) * KEPT[row]
    assert any(line.startswith(f"FAIL {row}: ratio to the floor {high:.3f}") for line in lines)
    assert run({row: (ABOVE_MAX - 0.01,)})[0] == 0


def test_a_slow_floor_in_one_try_only_passes(run: Run) -> None:
    assert run({PAGE: (20.0, 1.0)})[0] == 0
    assert run({PAGE: (20.0, 0.3, 20.0)})[0] == 1


def test_the_bounds_are_inside() -> None:
    known = Known(0.5, 1.0)
    assert holds(MARGIN * 0.5, known)
    assert holds(ABOVE_MAX, known)
    for outside in (MARGIN * 0.5 - 1e-9, ABOVE_MAX + 1e-9, float("nan"), float("inf")):
        assert not holds(outside, known)
    passed = f"ok   {FIRST}: ratio to the floor 0.900, kept 0.500 to 1.000, passes from 0.250 to 3"
    assert verdict(FIRST, 0.9, known).startswith(passed)


def test_a_ratio_is_of_the_rounds_that_nothing_disturbed() -> None:
    """Five of 40 rounds suffice; a slow server is slow in all of them, and one may be odd."""
    quiet = samples(*[1.0] * 40)
    assert check.undisturbed_ms(quiet) == 1.0
    assert check.undisturbed_ms(samples(*[50.0] * 35, *[1.0] * 5)) == 1.0
    assert check.undisturbed_ms(samples(1.0, *[2.0] * 39)) == 2.0


# -- measuring again -----------------------------------------------------------------------------


def test_a_case_that_misses_once_is_measured_again_and_alone(run: Run) -> None:
    code, lines, server = run({SECOND: (0.3, 1.0)})
    assert code == 0
    assert server.tries == [*check.CASES, "append-1"]
    assert lines[0] == "append-1 misses, measured again: try 2 of 3"


def test_a_third_try_within_the_bounds_counts(run: Run) -> None:
    code, _, server = run({PAGE: (0.3, 0.2, 0.9)})
    assert code == 0
    assert server.tries == [*check.CASES, "diff-1000", "diff-1000"]


def test_there_is_no_fourth_try(run: Run) -> None:
    code, lines, server = run({PAGE: (0.3, 0.48, 0.4, 1.0)})
    assert code == 1
    assert server.tries == [*check.CASES, "diff-1000", "diff-1000"]
    assert any(line.startswith(f"FAIL {PAGE}: ratio to the floor 0.480") for line in lines)


def test_a_row_that_passed_keeps_its_ratio_when_its_case_runs_again(run: Run) -> None:
    code, lines, _ = run({FIRST: (0.3, 1.0), SECOND: (1.0, 0.1)})
    assert code == 0
    assert any(line.startswith(f"ok   {SECOND}: ratio to the floor 0.700") for line in lines)


# -- absence is not success ----------------------------------------------------------------------


def test_a_row_that_the_file_lacks_fails(run: Run) -> None:
    code, lines, _ = run(rows=KEPT | {"append-1: a new row": 1.0})
    assert code == 1
    assert "FAIL append-1: a new row: measured, but the file has no ratio of it" in lines


def test_a_row_that_is_no_longer_measured_fails(run: Run) -> None:
    code, lines, _ = run(rows={row: KEPT[row] for row in (FIRST, HUNDRED, PAGE)})
    assert code == 1
    assert f"FAIL {SECOND}: in the file, but no longer measured" in lines


def test_a_run_that_measured_nothing_fails(run: Run) -> None:
    code, lines, _ = run(rows={})
    assert code == 1
    assert lines[-1] == f"bench-check: {len(KEPT)} failed"


def test_row_problems_are_none_if_both_sides_have_the_same_rows() -> None:
    assert row_problems(reversed(KEPT), KEPT) == []


def case_with(ratios: str, machine: str = '{"processor": "x"}') -> str:
    """A file with one case, of these ratios."""
    kept = f'{{"machine": {machine}, "options": {{}}, "ratios": {ratios}}}'
    return f'{{"format": 2, "cases": {{"a": [{kept}]}}}}'


NO_NUMBER = "'a: b' is not a number from 0.001 to 1000"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "not JSON"),
        ("{", "not JSON"),
        ("[]", "not an object of format 2"),
        ("{}", "not an object of format 2"),
        ('{"format": 1, "ratios": {"a": 1}}', "not an object of format 2"),
        ('{"format": 2}', "no cases"),
        ('{"format": 2, "cases": {}}', "no cases"),
        ('{"format": 2, "cases": {"a": 1}}', "'a' has no machines"),
        ('{"format": 2, "cases": {"a": []}}', "'a' has no machines"),
        ('{"format": 2, "cases": {"a": [1]}}', "'a' does not say where"),
        ('{"format": 2, "cases": {"a": [{"ratios": {"b": 1}}]}}', "'a' does not say where"),
        (case_with('{"a: b": 1}', machine="{}"), "'a' does not say where"),
        (case_with('{"a: b": 1}', machine='{"processor": null}'), "'a' does not say where"),
        (case_with("{}"), "'a' has no ratios"),
        (case_with('{"b": 1}'), "'a' has a ratio of 'b'"),
        (case_with('{"ab: c": 1}'), "'a' has a ratio of 'ab: c'"),
        (case_with('{"a: b": "1"}'), NO_NUMBER),
        (case_with('{"a: b": true}'), NO_NUMBER),
        (case_with('{"a: b": null}'), NO_NUMBER),
        (case_with('{"a: b": 0}'), NO_NUMBER),
        (case_with('{"a: b": -1.0}'), NO_NUMBER),
        (case_with('{"a: b": 0.0009}'), NO_NUMBER),
        (case_with('{"a: b": 1000.1}'), NO_NUMBER),
        (case_with('{"a: b": 1' + 400 * "0" + "}"), NO_NUMBER),
        (case_with('{"a: b": NaN}'), NO_NUMBER),
        (case_with('{"a: b": Infinity}'), NO_NUMBER),
        (100_000 * "[", "not JSON"),
    ],
)
def test_a_malformed_file_fails_before_anything_is_measured(run: Run, text: str, why: str) -> None:
    with pytest.raises(FileProblem, match=why):
        parse_file(text)
    code, lines, server = run(text=text)
    assert code == 1
    assert server.tries == []
    assert len(lines) == 1
    assert lines[0].startswith("ERROR: ")
    assert why in lines[0]
    assert "kept.json" in lines[0]


def test_a_missing_file_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "absent.json"
    assert check.main(["--kept", str(path)], Server({}, KEPT)) == 1
    assert "No such file" in (out := capsys.readouterr().out)
    assert str(path) in out


def test_bytes_that_are_no_text_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept.json"
    path.write_bytes(b"\xff\xfe")
    assert check.main(["--kept", str(path)], Server({}, KEPT)) == 1
    assert capsys.readouterr().out.startswith(f"ERROR: {path}: ")


@pytest.mark.parametrize("error", [BenchmarkError("503 for a request"), OSError("no program")])
def test_a_case_that_cannot_be_measured_fails(
    error: Exception, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    path.write_text(spelled(KEPT))

    def broken(case: str) -> dict[str, float]:
        raise error

    assert check.main(["--kept", str(path)], broken) == 1
    assert capsys.readouterr().out == f"ERROR: {error}\n"


# -- keeping -------------------------------------------------------------------------------------


def test_what_was_kept_is_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kept.json"
    assert check.main(["--write", "--kept", str(path)], Server({}, KEPT)) == 0
    kept = parse_file(path.read_text())
    assert list(kept) == list(check.CASES)
    assert lowest(kept) == KEPT
    for [case] in kept.values():
        assert case.machine["processor"]
        assert case.machine["date"].endswith(" UTC")
        assert case.options["rounds"] == check.ROUNDS_WRITTEN
    assert check.main(["--kept", str(path)], Server({}, KEPT)) == 0
    assert check.main(["--kept", str(path)], Server({PAGE: (0.4,)}, KEPT)) == 1
    assert f"kept {FIRST}: 0.800" in capsys.readouterr().out


def test_the_other_cases_keep_their_ratios_and_machines(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(spelled(KEPT))
    server = Server({HUNDRED: (2.0,)}, KEPT)
    assert check.main(["--kept", str(path), "--write", "append-100"], server) == 0
    assert server.tries == ["append-100"]
    kept = parse_file(path.read_text())
    assert [each.processor for each in kept["append-1"]] == ["Some"]
    [some, here] = kept["append-100"]
    assert some.processor == "Some"
    assert some.ratios == {HUNDRED: KEPT[HUNDRED]}
    assert here.processor == describe(tmp_path)["processor"]
    assert here.ratios == {HUNDRED: 2 * KEPT[HUNDRED]}
    assert check.main(["--kept", str(path), "--write", "append-100"], Server({}, KEPT)) == 0
    assert [each.ratios for each in parse_file(path.read_text())["append-100"]] == [some.ratios] * 2


def test_the_ratios_of_an_equal_processor_count_and_else_all_of_the_row() -> None:
    fast = kept_on("Fast", {FIRST: 0.8, PAGE: 1.0})
    slow = kept_on("Slow", {FIRST: 0.5, PAGE: 1.1, HUNDRED: 0.3})
    cases = {case: [*fast.get(case, ()), *slow[case]] for case in slow}
    hundred = {HUNDRED: Known(0.3, 0.3)}
    on_fast = {FIRST: Known(0.8, 0.8), PAGE: Known(1.0, 1.0)}
    assert known_ratios(cases, "Fast") == on_fast | hundred
    on_slow = {FIRST: Known(0.5, 0.5), PAGE: Known(1.1, 1.1)}
    assert known_ratios(cases, "Slow") == on_slow | hundred
    on_other = {FIRST: Known(0.5, 0.8), PAGE: Known(1.0, 1.1)}
    assert known_ratios(cases, "Other") == on_other | hundred


@pytest.mark.parametrize("share", [0.4, 4.0, float("nan"), float("inf")])
def test_a_ratio_that_would_not_pass_is_not_kept(
    share: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """One bad measurement would lower the bound for every unknown processor."""
    path = tmp_path / "kept.json"
    path.write_text(before := spelled(KEPT))
    assert check.main(["--kept", str(path), "--write"], Server({HUNDRED: (share,)}, KEPT)) == 1
    assert capsys.readouterr().out.startswith(f"ERROR: {path}: not kept: FAIL {HUNDRED}: ratio")
    assert path.read_text() == before


@pytest.mark.parametrize("ratio", [float("nan"), float("inf"), 0.0004, 0.0, -1.0])
def test_a_file_that_could_not_be_read_again_is_not_written(ratio: float, tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    assert check.main(["--kept", str(path), "--write"], Server({}, KEPT | {PAGE: ratio})) == 1
    assert check.main(["--kept", str(path), "--write"], Server({}, {})) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_renamed_row_is_kept_by_one_write_for_all_machines(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    renamed = {row.replace(FIRST, "append-1: another name"): KEPT[row] for row in KEPT}
    path.write_text(spelled(KEPT))
    assert check.main(["--kept", str(path)], Server({}, renamed)) == 1
    assert check.main(["--kept", str(path), "--write", "append-1"], Server({}, renamed)) == 0
    assert check.main(["--kept", str(path)], Server({}, renamed)) == 0
    kept = parse_file(path.read_text())
    assert {row for each in kept["append-1"] for row in each.ratios} == renamed.keys() - KEPT | {
        SECOND
    }
    assert lowest(kept, "Some").keys() == renamed.keys()


def test_the_ratios_of_this_processor_are_compared(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    here = kept_on(str(describe(tmp_path)["processor"]), KEPT)
    low = kept_on("Other", {row: ratio / 10 for row, ratio in KEPT.items()})
    path.write_text(spelled_file({case: low[case] + here[case] for case in here}))
    assert check.main(["--kept", str(path)], Server({}, KEPT)) == 0
    assert check.main(["--kept", str(path)], Server({HUNDRED: (0.4,)}, KEPT)) == 1


def test_a_part_is_not_written_into_a_missing_file(tmp_path: Path) -> None:
    path = tmp_path / "absent.json"
    assert check.main(["--kept", str(path), "--write", "append-100"], Server({}, KEPT)) == 1
    assert not path.exists()


def test_a_failed_write_leaves_the_file(tmp_path: Path) -> None:
    path = tmp_path / "kept.json"
    path.write_text(before := spelled(KEPT))

    def broken(case: str) -> dict[str, float]:
        raise BenchmarkError("it does not start")

    assert check.main(["--write", "--kept", str(path)], broken) == 1
    assert path.read_text() == before


def test_the_kept_file_of_the_repository_has_every_row() -> None:
    rows = lowest(parse_file(check.KEPT.read_text("utf-8")))
    for case in check.CASES:
        found = [row for row in rows if row.startswith(f"{case}: ")]
        assert [row.rpartition(", ")[2] for row in found] == ["1 connection"]


# -- arguments and real processes ----------------------------------------------------------------


@pytest.mark.parametrize(
    "words",
    [
        ["--no-such-option"],
        ["append-1"],
        ["--write", "no-such-case"],
        ["--kept"],
        ["--dir", "/no/such/folder"],
        ["--server", "'"],
    ],
)
def test_wrong_arguments_get_usage_and_2(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(words, Server({}, KEPT))
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: ./run bench-check")


def test_a_storing_floor_parses_writes_and_keeps_what_it_gets(tmp_path: Path) -> None:
    path = tmp_path / "bodies"
    store = floor.store_in(path)
    store(b'{"a": 1}')
    store(b"[]")
    assert path.read_bytes() == b'{"a": 1}{"a": 1}[][]'
    with pytest.raises(ValueError, match="unexpected end"):
        store(b"{")
    with pytest.raises(FileExistsError):
        floor.store_in(path)


def test_a_storing_floor_keeps_so_much_and_writes_from_the_start_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(floor, "FILE_BYTES", 8)
    monkeypatch.setattr(floor, "KEPT_BYTES", 8)
    path = tmp_path / "bodies"
    store = floor.store_in(path)
    for body in (b"[11]", b"[22]", b"[33]"):
        store(body)
    assert path.read_bytes() == b"[33][33]"


def test_a_floor_stores_bodies_if_it_is_told_to(tmp_path: Path) -> None:
    reply = Reply(200, (("Content-Type", "application/json"),), b"{}")
    options = check.options_of(check.arguments(["--dir", str(tmp_path)]))
    with check.ShortBench(options, []) as bench:
        for name, stores in (("bare", False), ("storing", True)):
            started = bench.start_floor(name, reply, stores=stores)
            answer = started.call("POST", "/v0/topics/t", b'{"records": []}')
            assert (answer.status, answer.body) == (200, b"{}")
            started.stop()
        stored = [path for path in bench.folder.iterdir() if path.suffix == ".bodies"]
        assert [path.name for path in stored] == ["floor-storing.bodies"]
        assert stored[0].read_bytes() == 2 * b'{"records": []}'


@pytest.mark.parametrize(("storing", "ratio"), [({}, 0.25), ({"storing floor": 2.0}, 0.5)])
def test_a_ratio_is_to_the_storing_floor_if_the_case_has_one(
    storing: dict[str, float], ratio: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    latencies = {"ours": 4.0, "floor": 1.0} | storing

    def case(bench: check.ShortBench) -> list[Figure]:
        bench.taken.append({name: samples(*[p50] * 10) for name, p50 in latencies.items()})
        return [Figure("x", "row", Series("", "", (1.0,)))]

    monkeypatch.setitem(STORE_CASES, "x", case)
    options = check.options_of(check.arguments(["--dir", str(tmp_path)]))
    assert check.measure("x", options) == {"x: row": ratio}


REFUSING = """
import http.server, os, pathlib
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def answer(self):
        self.rfile.read(int(self.headers.get("content-length", 0)))
        self.send_response(503 if self.command == "POST" else 200)
        self.send_header("content-length", "2")
        self.end_headers()
        self.wfile.write(b"{}")
    do_GET = do_PUT = do_POST = answer
    def log_message(self, *words): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
pathlib.Path(os.environ["TOPICS_PORT_FILE"]).write_text(str(server.server_port))
server.serve_forever()
"""


NO_PORT = """
import os, pathlib, time
pathlib.Path(os.environ["TOPICS_PORT_FILE"]).write_text("garbage")
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("program", "why"),
    [
        ("raise SystemExit('no such setting')", "server ended with 1: no such setting"),
        (REFUSING, "requests failed, first: HTTP/1.1 503"),
        (REFUSING.replace("503", "200"), "an append of 1 has 0 seqs"),
        (NO_PORT, "no port number in "),
    ],
)
def test_a_server_that_does_not_serve_fails(
    program: str, why: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    path.write_text(spelled(KEPT))
    script = tmp_path / "server.py"
    script.write_text(program)
    command = shlex.join([sys.executable, str(script)])
    words = ["--kept", str(path), "--server", command, "--dir", str(tmp_path)]
    assert check.main(words) == 1
    out = capsys.readouterr().out
    assert out.startswith("ERROR: ")
    assert why in out


def test_a_server_command_that_does_not_exist_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "kept.json"
    path.write_text(spelled(KEPT))
    words = ["--kept", str(path), "--server", "/no/such/program", "--dir", str(tmp_path)]
    assert check.main(words) == 1
    assert "/no/such/program" in capsys.readouterr().out
