"""Tests of the architecture: which module may import which, where effects happen, and the form of
files.

The table of layers is in `tests/layers.py`. Each message says what to do. If a rule is wrong for a
case, list the exception here with a reason; do not work around the rule in the code.
"""

from __future__ import annotations

import ast
import re
import tokenize
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.layers import LAYERS, layer_of, may_import
from tests.source_tree import PACKAGE, ROOT, SOURCE, Import, Module, load_modules

FILE_LINES_MAX = 600
FILE_LINES_ASK = 400
FUNCTION_LINES_ASK = 70

# A pure module imports none of these: files, clocks, chance, threads, event loops, servers, logs.
IO_MODULES = frozenset(
    """anyio asyncio concurrent fcntl ftplib glob httpx logging mmap multiprocessing os pathlib
    platform prometheus_client pyspark queue random resource rich secrets select selectors shutil
    signal socket socketserver sqlite3 sse_starlette ssl starlette subprocess tempfile threading
    time trio uuid uvicorn uvloop websockets""".split()
)
# The only packages besides the standard library that a pure module may import.
PURE_LIBRARIES = frozenset({"msgspec", "numpy", "orjson", "xxhash"})
# Spark executors load these without the server's dependencies (ARCHITECTURE, Map).
SPARK_SAFE = (
    "wal.format.json_objects",
    "wal.format.segment",
    "wal.format.manifest",
    "wal.layout",
    "archive.continuous.places.ranges",
    "values.texts.archive_url",
)
# Modules of `spark_jobs` that only the driver loads, and the modules of ours that they import in
# addition.
ON_THE_DRIVER = {"reader/places/archive.py": ("archive", "wal.fs")}
SPARK_LIBRARIES = frozenset({"numpy", "xxhash"})

# Packages beside the server's, and the bounds for all packages together.
ROOMS_BESIDE = ("benchmarks", "spark_jobs", "pyspark_topics")
FLOORS_MAX, ARROWS_MAX = 9, 65

CLIENT = "the client runs in programs of others, and imports nothing of the server's"
# Effects and the modules that own them. To add one, write why no other module can do it.
OWNERS: dict[str, dict[str, str]] = {
    "time": {
        "runtime.clock": "the only wall and monotonic time",
        "wal.fs": "the wait for a lock that its last holder is giving up",
        "client.effects": CLIENT,
    },
    "random": {"runtime.clock": "the only chance", "client.effects": CLIENT},
    "secrets": {"runtime.clock": "random ids", "client.effects": CLIENT},
    "uuid": {"runtime.clock": "random ids"},
    "os": {
        "http.exchange.flow_control": "the share of an upload, read past its transport",
        "wal.fs": "the only open, write, sync and rename",
        "wal.directory": "the pid and the boot id in the directory's marks",
        "settings.settings": "the environment and the number of cores",
        "wal.segments.packing_process": "the niceness of the helper process",
        "engine.background.append_decoder": "the niceness of the helper process",
        "views.workers.view_file": "the files of views, which the database writes",
        "views.workers.view_folder": "the folders of views, and the files of those that are gone",
        "views.workers.apply_worker": "the niceness of the helper process and its lock",
        "views.workers.query_worker": "the niceness of the helper process",
        "client.effects": CLIENT,
        "client.front.cursors": CLIENT,
        "cli.queues.work": "the environment of a worker's command",
        "__main__": "the standard streams, before anything else is opened",
        "settings.key_file": "the mode of the file that holds the keys",
        "cli.stopping": "the end of a verb without clean-ups, from another thread",
    },
}
# The top loops: an unforeseen exception ends there, because only the runtime is above them.
TOP_LOOPS = {
    "api.waiting_turn": "a defect in a waiting request becomes its answer, the throttle goes on",
    "api.front_door": "a defect in a handler becomes a 500, not a broken connection",
    "api.watch.send_queue": "other servers raise what they like when their client is gone",
    "api.direct": "a defect in an answer breaks its connection, and reaches nobody else's",
    "http.exchange.asgi_exchange": "a defect in an application ends its connection, nobody else's",
    "http.websocket": "a defect in an application ends its socket, nobody else's",
    "http.read_scheduler": "a defect in reading breaks its connection, nobody else's",
    "http.exchange.flow_control": "a defect in reading a share breaks its connection, no other's",
    "api.websocket.handlers": "a defect in a publish becomes its answer, no other's",
    "wal.journal.wal_writer": "a defect in the writer thread makes the shard read-only, not silent",
    "client.working.worker_run": "a handler that fails gives its job back, whatever it raised",
    "cli.data.loading": "a thread hands what it raised to the thread that sends",
    "engine.background.mender": "a defect in a mend is told and tried again",
    "engine.background.sealer": "a defect in the work of one topic is told and tried again",
    "views.build": "a defect in building a view stops that view, nobody else's",
    "client.working.threads": "a thread hands what a handler raised to whoever waits for it",
}
# Words that the glossary retired, and the words to write instead. No name may contain a retired
# word.
RETIRED = {
    "bare": "without payloads",
    "bell bells ring rings rung": "listener, notify",
    "books": "lease table",
    "cohort cohorts": "broadcast group, fair share",
    "doomed": "shed",
    "evidence": "what is known of the copies",
    "feeds": "dispatcher",
    "figures": "metrics",
    "handoff": "storage types",
    "hub": "notifier",
    "hurries hurry": "flush_now",
    "husk": "drop_payload",
    "inbox": "read scheduler",
    "insists": "must_run",
    "listed": "what is in the list",
    "moves": "transfers",
    "outbox": "send queue",
    "park parked parking": "wait queue",
    "patience": "timeouts, retries",
    "publishing": "publisher, atomic write",
    "refusals": "errors",
    "rendered": "json cache, encoded",
    "settle settled settling settles": "resolve, finish, or the verb that says what happens",
    "spot spots": "shared cursor",
    "told": "headers, fields, callback, or the noun that it is",
    "track tracks": "subscription",
}
KEPT_NAMES = {
    "KeyRing": "a key ring, as in every other program",
    "key_ring": "a key ring, as in every other program",
    "patience_ms": "an option of the Python client, which programs of others name",
    "PATIENCE_MS": "the default of that option",
    "dead_letter_moves": "the module of jobs that move to another topic",
}
VAGUE_NAMES = frozenset({"utils", "util", "helpers", "helper", "common", "misc", "manager"})

ALL = load_modules()
OPEN_PACKAGES = ("cli", "client", "settings")
CODE = {n: m for n, m in ALL.items() if not m.is_package or n in OPEN_PACKAGES}
PURE = {name: m for name, m in CODE.items() if m.is_pure}


def fail_with(problems: list[str], advice: str) -> None:
    """Fail once with every problem found, and what to do about them."""
    if problems:
        pytest.fail("\n".join([*sorted(problems), f"-> {advice}"]), pytrace=False)


def standard_or(item: Import, libraries: frozenset[str]) -> bool:
    import sys

    return item.top in sys.stdlib_module_names or item.top == PACKAGE or item.top in libraries


# -- the table ---------------------------------------------------------------------------------


def test_every_module_has_a_layer() -> None:
    problems = [f"{m.where}: {name} has no layer" for name, m in CODE.items() if not layer_of(name)]
    fail_with(problems, "move it into a folder of tests/layers.py, or add the folder there")


def test_every_layer_exists() -> None:
    """`LAYERS` names folders and modules that exist, on both sides."""
    known = set(ALL)
    named = set(LAYERS).union(*LAYERS.values())
    fail_with([f"{name}: no such folder" for name in named - known], "take it out of the table")


@pytest.mark.parametrize("name", sorted(CODE))
def test_imports_follow_the_layers(name: str) -> None:
    known = set(ALL)
    problems = [
        f"{ALL[name].where}:{line}: {name} may not import {target or PACKAGE}"
        for target, line in ALL[name].own_imports(known)
        if not may_import(name, target)
    ]
    fail_with(
        problems,
        f"layer {layer_of(name)} may import: {', '.join(sorted(LAYERS[layer_of(name) or '']))}. "
        "Move the code to where its noun lives, pass the value in, or (if the design is wrong) "
        "widen the layer in tests/layers.py and write why",
    )


def test_pure_modules_import_pure_modules() -> None:
    known = set(ALL)
    problems = [
        f"{m.where}:{line}: is pure and imports {target}, which is not"
        for name, m in PURE.items()
        for target, line in m.own_imports(known)
        if target in CODE and target not in PURE
    ]
    fail_with(problems, "pass the value in; or the module is not pure: say so in its docstring")


def test_imports_are_absolute_and_whole() -> None:
    problems: list[str] = []
    for module in ALL.values():
        for node in module.nodes:
            if isinstance(node, ast.ImportFrom) and (node.level or node.names[0].name == "*"):
                problems.append(f"{module.where}:{node.lineno}: {ast.unparse(node)}")
    fail_with(problems, f"write `from {PACKAGE}.module import name`")


# Modules that these libraries document. Their other modules may change without notice.
PUBLIC_MODULES = {
    "starlette": "applications routing",
    "uvicorn": "",
    "websockets": "datastructures exceptions frames http11 server sync.client sync.connection",
}


def test_libraries_are_used_by_their_public_names() -> None:
    problems: list[str] = []
    for module in ALL.values():
        for item in module.imports:
            if item.top not in PUBLIC_MODULES:
                continue
            _, _, rest = item.module.partition(".")
            is_public = not rest or rest in PUBLIC_MODULES[item.top].split()
            if not is_public or (item.member or "").startswith("_"):
                problems.append(f"{module.where}:{item.line}: {item.module} {item.member or ''}")
    fail_with(problems, "inherit and import nothing that the library does not document")


def test_no_import_cycle() -> None:
    known = set(ALL)
    graph = {name: {target for target, _ in m.own_imports(known)} for name, m in ALL.items()}
    problems: list[str] = []
    for start in graph:
        seen: set[str] = set()
        todo = [*graph[start]]
        while todo:
            if (name := todo.pop()) not in seen:
                seen.add(name)
                todo.extend(graph.get(name, ()))
        if start in seen:
            problems.append(f"{start or PACKAGE}: reaches itself through its imports")
    fail_with(problems, "one of these holds something that belongs further down")


def room_of(module: str) -> str:
    """The folder or module of the package, or the package beside it, that a module belongs to."""
    parts = module.split(".")
    if parts[0] == PACKAGE:
        return parts[1] if len(parts) > 1 else ""
    return parts[0] if parts[0] in ROOMS_BESIDE else ""


def arrows() -> dict[str, set[str]]:
    """Each room, and the other rooms that its modules import, also late or for types only."""
    paths = [(room_of(f"{PACKAGE}.{module.name}"), module.path) for module in ALL.values()]
    for room in ROOMS_BESIDE:
        paths += [(room, path) for path in (ROOT / room).rglob("*.py")]
    found: dict[str, set[str]] = {room: set() for room, _ in paths if room}
    for room, path in paths:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names: list[str] = []
            if isinstance(node, ast.ImportFrom) and node.module and not node.level:
                names = [node.module]
                if node.module == PACKAGE:
                    names = [f"{PACKAGE}.{alias.name}" for alias in node.names]
            elif isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            if room:
                found[room] |= {room_of(name) for name in names} - {"", room}
    return found


def test_the_house_stands_on_few_floors() -> None:
    """The floor of a room is one above the highest floor among the rooms that it imports."""
    found = arrows()
    floors: dict[str, int] = {}
    while len(floors) < len(found):
        ready = [r for r in found if r not in floors and found[r] <= floors.keys()]
        assert ready, f"a circle among {sorted(found.keys() - floors.keys())}"
        floors |= {r: 1 + max((floors[under] for under in found[r]), default=0) for r in ready}
    drawn = [f"{room} -> {under}" for room, unders in found.items() for under in unders]
    assert max(floors.values()) <= FLOORS_MAX, floors
    if len(drawn) > ARROWS_MAX:
        fail_with(drawn, f"{len(drawn)} arrows: what two rooms use belongs into one below both")


# -- purity and effects ------------------------------------------------------------------------


def declarations(module: Module) -> Iterator[ast.AST]:
    """Methods of protocols: they declare the work of other classes."""
    for node in module.nodes:
        if isinstance(node, ast.ClassDef):
            bases = {ast.unparse(base).partition("[")[0] for base in node.bases}
            if "Protocol" in bases:
                yield from node.body


@pytest.mark.parametrize("name", sorted(PURE))
def test_pure_modules_touch_nothing(name: str) -> None:
    """No I/O, no clock, no event loop, and no library that brings them."""
    module = PURE[name]
    problems: list[str] = []
    declared = set(declarations(module))
    for item in module.imports:
        if item.top in IO_MODULES:
            problems.append(f"{module.where}:{item.line}: a pure module imports {item.top}")
        elif not standard_or(item, PURE_LIBRARIES):
            problems.append(f"{module.where}:{item.line}: {item.top} is not for pure modules")
    for node in module.nodes:
        line = f"{module.where}:{getattr(node, 'lineno', 0)}"
        if isinstance(node, ast.AsyncFunctionDef | ast.Await) and node not in declared:
            problems.append(f"{line}: async in a pure module")
        elif isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in {"open", "input", "__import__"}:
                problems.append(f"{line}: {called}() in a pure module")
            elif re.fullmatch(r"(datetime|date|dt)(\.\w+)*\.(now|utcnow|today)", called):
                problems.append(f"{line}: {called}() reads the clock")
    fail_with(problems, "take now_ms, ids and bytes as arguments; let the driver fetch them")


def test_spark_can_load_the_formats() -> None:
    """Modules that executors load import nothing but the standard library, numpy and xxhash."""
    known = set(ALL)
    problems: list[str] = []
    for start in SPARK_SAFE:
        seen: set[str] = set()
        todo = [start]
        while todo:
            name = todo.pop()
            if name in seen or name not in ALL:
                continue
            seen.add(name)
            todo.extend(target for target, _ in ALL[name].own_imports(known))
            problems.extend(
                f"{ALL[name].where}:{item.line}: {start} reaches {item.top}"
                for item in ALL[name].imports
                if not standard_or(item, SPARK_LIBRARIES)
            )
    fail_with(problems, "a format module holds bytes only; keep structs in the driver beside it")


def test_effects_live_with_their_owners() -> None:
    problems = [
        f"{module.where}:{item.line}: {name} imports {item.top}; its owners are "
        + ", ".join(f"{owner} ({why})" for owner, why in OWNERS[item.top].items())
        for name, module in CODE.items()
        for item in module.imports
        if item.top in OWNERS and name not in OWNERS[item.top]
    ]
    fail_with(problems, "ask the owner, or add yourself to OWNERS in tests/test_tidy.py with why")


def test_the_environment_is_read_in_settings_only() -> None:
    problems: list[str] = []
    for name, module in CODE.items():
        if name == "settings.settings":
            continue
        for node in module.nodes:
            if isinstance(node, ast.Attribute) and node.attr in {"environ", "environb", "getenv"}:
                problems.append(f"{module.where}:{node.lineno}: {ast.unparse(node)}")
        problems.extend(
            f"{module.where}:{item.line}: imports {item.module}.{item.member}"
            for item in module.imports
            if item.member in {"environ", "getenv"}
        )
    fail_with(problems, "add a field to Settings (a command's own option may use click's envvar)")


def calls(module: Module, function: str) -> Iterator[int]:
    """Lines on which the plain name `function` is called."""
    for node in module.nodes:
        match node:
            case ast.Call(func=ast.Name(id=name)) if name == function:
                yield node.lineno


BUILT_IN = set("Any None bool bytes dict float int list msgspec Raw set str tuple".split())


def test_decoders_are_made_at_import() -> None:
    """Two threads that use a Struct type at once for the first time crash (decision 0361)."""
    problems = [
        f"{module.where}:{call.lineno}: {ast.unparse(call)[:60]}"
        for module in ALL.values()
        for call in ast.walk(module.tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".decode")
        for given in call.keywords
        if given.arg == "type"
        and {n.id for n in ast.walk(given.value) if isinstance(n, ast.Name)} - BUILT_IN
    ]
    fail_with(problems, "make a decoder of the type where the module begins")


def test_nobody_prints() -> None:
    problems = [f"{m.where}:{line}: print()" for m in ALL.values() for line in calls(m, "print")]
    fail_with(problems, "return the text; only cli/ writes to the terminal, with click.echo")


def test_only_the_wal_meets_the_disk() -> None:
    """`engine` and `api` neither open files nor catch `OSError`; in `wal` only `fs` opens them.

    Helper processes are an exception: the end of their pipes is an `OSError`.
    """
    problems: list[str] = []
    for name, module in CODE.items():
        package = name.partition(".")[0]
        if package in {"engine", "api"} or (package == "wal" and name != "wal.fs"):
            problems.extend(f"{module.where}:{line}: open()" for line in calls(module, "open"))
        if package in {"engine", "api"} and name != "engine.background.append_decoder":
            problems.extend(
                f"{module.where}:{node.lineno}: except {ast.unparse(node.type)}"
                for node in module.nodes
                if isinstance(node, ast.ExceptHandler) and node.type is not None
                if {"OSError", "IOError"} & caught(node)
            )
    fail_with(problems, "go through wal.fs and the ports; StorageError is what leaves wal/")


# -- exceptions --------------------------------------------------------------------------------


def caught(handler: ast.ExceptHandler) -> set[str]:
    """Names of the exceptions a handler catches; a bare one catches `BaseException`."""
    if handler.type is None:
        return {"BaseException"}
    kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
    return {ast.unparse(kind) for kind in kinds}


def reraises(handler: ast.ExceptHandler) -> bool:
    last = handler.body[-1]
    return isinstance(last, ast.Raise) and last.exc is None


def test_broad_excepts_stand_in_the_top_loops_only() -> None:
    """A handler that ends in a bare `raise` cleans up and hides nothing, so it does not count."""
    problems: list[str] = []
    for name, module in CODE.items():
        lines = [
            node.lineno
            for node in module.nodes
            if isinstance(node, ast.ExceptHandler) and not reraises(node)
            if {"Exception", "BaseException"} & caught(node)
        ]
        if len(lines) > (name in TOP_LOOPS):
            problems.extend(f"{module.where}:{line}: catches everything" for line in lines)
    loops = "; ".join(f"{name}: {why}" for name, why in TOP_LOOPS.items())
    fail_with(problems, f"name the exceptions you expect. Allowed, once each: {loops}")


# numpy imports `numpy.ma` when one of these first runs: without a file descriptor left that fails,
# in the middle of work.
LAZY_NUMPY = {"unique", "isin", "in1d", "setdiff1d", "intersect1d", "union1d", "setxor1d"}


def test_no_numpy_function_imports_a_module_while_it_runs() -> None:
    problems = [
        f"{module.where}:{node.lineno}: np.{node.attr}"
        for module in CODE.values()
        for node in module.nodes
        if isinstance(node, ast.Attribute)
        if isinstance(node.value, ast.Name) and node.value.id == "np" and node.attr in LAZY_NUMPY
    ]
    fail_with(problems, "sort and search instead")


# -- words -------------------------------------------------------------------------------------


def names_in(path: Path) -> Iterator[tuple[str, int]]:
    """Yield every identifier of a file, and its line; comments and strings hold none."""
    with path.open("rb") as file:
        for token in tokenize.tokenize(file.readline):
            if token.type == tokenize.NAME:
                yield token.string, token.start[0]


def parts_of(name: str) -> set[str]:
    """Split an identifier into its words: `_set_hub` and `SetHub` are `set` and `hub`."""
    return {part.lower() for part in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)}


def test_retired_words_stay_retired() -> None:
    """No name has a word of the glossary's left column (`docs/GLOSSARY.md`)."""
    instead = {word: text for words, text in RETIRED.items() for word in words.split()}
    problems: set[str] = set()
    for folder in (SOURCE, ROOT / "spark_jobs"):
        for path in folder.rglob("*.py"):
            for name, line in names_in(path):
                for word in parts_of(name) & instead.keys() if name not in KEPT_NAMES else ():
                    where = f"{path.relative_to(ROOT)}:{line}"
                    problems.add(f"{where}: {name}: {word} is {instead[word]}")
    fail_with(sorted(problems), "name it with the field's word, see docs/GLOSSARY.md")


# -- files -------------------------------------------------------------------------------------


def test_every_module_says_what_it_owns() -> None:
    problems = [m.where for m in ALL.values() if not (ast.get_docstring(m.tree) or "").strip()]
    fail_with(problems, "start it with a docstring: what it owns, its invariants, who calls it")


def test_packages_hold_a_docstring_only() -> None:
    """An import here would make Spark, or a tool that wants one format, load the server.

    `cli` is the command, `client` and `settings` the names that programs of others import.
    """
    problems = [
        f"{module.where}: holds more than its docstring"
        for name, module in ALL.items()
        if module.is_package and name not in OPEN_PACKAGES and len(module.tree.body) != 1
    ]
    fail_with(problems, "import from the modules themselves")


def test_names_say_what_is_inside() -> None:
    problems = [
        f"{module.where}: says nothing"
        for module in ALL.values()
        if VAGUE_NAMES & {module.path.stem, module.path.parent.name}
    ]
    fail_with(problems, "name the noun it owns")


def test_no_file_is_over_600_lines(capsys: pytest.CaptureFixture[str]) -> None:
    """Long files are printed as a hint, and only very long ones fail."""
    too_long, long = [], []
    for module in ALL.values():
        lines = module.text.count("\n")
        if lines > FILE_LINES_MAX:
            too_long.append(f"{module.where}: {lines} lines")
        elif lines > FILE_LINES_ASK:
            long.append(f"{module.where}: {lines} lines")
        for function in module.functions:
            length = (function.end_lineno or function.lineno) - function.lineno + 1
            if length > FUNCTION_LINES_ASK:
                long.append(f"{module.where}:{function.lineno}: {function.name} has {length} lines")
    if long:
        with capsys.disabled():
            print("\nlong; which noun wants to leave?", *sorted(long), sep="\n  ")
    fail_with(too_long, "split it: ask which noun wants to leave")


# -- tests and packaging -----------------------------------------------------------------------


def mirrored(folder: str, stem: str) -> bool:
    """Tell whether `tests/unit/FOLDER/test_STEM.py` names a module: STEM or STEM_anything."""
    words = stem.split("_")
    prefix = folder.replace("/", ".") + "." if folder else ""
    return any(prefix + "_".join(words[:n]) in ALL for n in range(len(words), 0, -1))


def test_unit_tests_mirror_the_source() -> None:
    unit = ROOT / "tests" / "unit"
    problems: list[str] = []
    for path in sorted(unit.rglob("test_*.py")):
        folder = path.parent.relative_to(unit).as_posix().removeprefix(".")
        if not mirrored(folder, path.stem.removeprefix("test_")):
            problems.append(f"{path.relative_to(ROOT)}: no module {folder or PACKAGE} of that name")
    fail_with(
        problems,
        "tests/unit/engine/log/test_log.py (or test_log_more.py) belongs to engine/log/log.py; "
        "what spans modules goes to tests/model, tests/storage or tests/api",
    )


def canonical(requirement: str) -> str:
    """A requirement's distribution name as the lock file spells it."""
    match = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert match is not None, requirement
    return re.sub(r"[-_.]+", "-", match.group()).lower()


def test_the_locks_hold_what_the_project_asks_for() -> None:
    """Every dependency is pinned with hashes, and the locks name no registry."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))
    extras = project["project"]["optional-dependencies"]
    everyday = [
        *project["project"]["dependencies"],
        *extras["dev"],
        *project["build-system"]["requires"],
    ]
    problems: list[str] = []
    for lock, wanted in {
        "requirements.lock": everyday,
        "requirements-spark.lock": [*extras["spark"], *extras["iceberg"]],
        "requirements-docs.lock": extras["docs"],
    }.items():
        text = (ROOT / lock).read_text("utf-8")
        pins = re.findall(r"^([a-z0-9.-]+)==((?:[^\n]*\\\n)*[^\n]*)", text, re.MULTILINE)
        asked = {canonical(requirement) for requirement in wanted}
        problems += [f"{lock}: {name} is missing" for name in asked - dict(pins).keys()]
        problems += [f"{lock}: {name} has no hash" for name, rest in pins if "sha256:" not in rest]
        if re.search(r"://|--(extra-)?index-url|--find-links", text):
            problems.append(f"{lock}: names a registry")
    fail_with(problems, "make it again as docs/decisions/0001-dependencies.md says")


# Dependencies that no module imports, and what they are for.
NOT_IMPORTED = {
    "swagger-ui-py": "its files are served; its code is not imported (0031)",
}


def test_what_is_declared_is_imported_and_the_other_way_round() -> None:
    """The server's dependencies are those that its modules import, no more and no less."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    declared = {canonical(requirement) for requirement in project["dependencies"]}
    optional = {
        canonical(requirement)
        for requirements in project["optional-dependencies"].values()
        for requirement in requirements
    }
    libraries = {
        item.top.replace("_", "-")
        for module in ALL.values()
        for item in module.imports
        if not standard_or(item, frozenset())
    }
    problems = [
        f"{name}: declared and not imported" for name in declared - libraries - {*NOT_IMPORTED}
    ]
    problems += [f"{name}: imported and not declared" for name in libraries - declared - optional]
    problems += [f"{name}: is imported" for name in libraries & {*NOT_IMPORTED}]
    fail_with(problems, "change the dependencies in pyproject.toml, or write down why")


def test_analytics_know_the_formats_only() -> None:
    """`spark_jobs` imports the format modules and their errors, nothing else of ours."""
    allowed = {
        f"{PACKAGE}.values",
        f"{PACKAGE}.values.errors",
        *(f"{PACKAGE}.{name}" for name in SPARK_SAFE),
        f"{PACKAGE}.wal",
    }
    problems: list[str] = []
    for path in sorted((ROOT / "spark_jobs").rglob("*.py")):
        text = path.read_text("utf-8")
        if text.count("\n") > FILE_LINES_MAX:
            problems.append(f"{path.name}: over {FILE_LINES_MAX} lines")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            else:
                continue
            more = tuple(
                f"{PACKAGE}.{name}"
                for name in ON_THE_DRIVER.get(str(path.relative_to(ROOT / "spark_jobs")), ())
            )
            problems.extend(
                f"{path.name}:{node.lineno}: imports {name}"
                for name in names
                if name.split(".")[0] == PACKAGE and name not in allowed
                if not (more and name.startswith(more))
            )
    fail_with(
        problems, "executors have the formats, not the server: pass what is needed as a value"
    )


# -- the shape of the package ----------------------------------------------------------------------

FOLDER_FILES_MAX = 14
# Names that `docs/GLOSSARY.md` replaced: no module, class or function may have one of them again.
RETIRED_NAMES = frozenset(
    """Waits Hub Feeds Track Spot Cohort Inbox Outbox Patience Parking QueueBooks FreshJobs Moves
    grammars handoff heap exposition inflight patience parking""".split()
)


def test_no_folder_has_more_than_14_files() -> None:
    folders: dict[str, int] = {}
    trees = [SOURCE, *(ROOT / name for name in ("spark_jobs", "tests", "benchmarks"))]
    for path in [path for tree in trees for path in tree.rglob("*.py")]:
        folder = str(path.parent.relative_to(ROOT))
        folders[folder] = folders.get(folder, 0) + 1
    problems = [
        f"{folder}: {count} files" for folder, count in folders.items() if count > FOLDER_FILES_MAX
    ]
    fail_with(problems, "give a group of these files a folder with a name")


def public_classes() -> Iterator[tuple[str, str]]:
    """Yield (class name, file) of every public class of the server and the analytics."""
    for path in [*SOURCE.rglob("*.py"), *(ROOT / "spark_jobs").rglob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                yield node.name, str(path.relative_to(ROOT))


def test_a_class_name_has_one_meaning() -> None:
    found: dict[str, list[str]] = {}
    for name, where in public_classes():
        found.setdefault(name, []).append(where)
    problems = [f"{name}: {', '.join(where)}" for name, where in found.items() if len(where) > 1]
    fail_with(problems, "give one of them the name of what it is")


def test_retired_names_stay_retired() -> None:
    problems = [
        f"{where}: class {name}" for name, where in public_classes() if name in RETIRED_NAMES
    ]
    problems += [m.where for m in ALL.values() if m.path.stem in RETIRED_NAMES]
    fail_with(problems, "docs/GLOSSARY.md has the word of the field")


def test_packages_list_their_modules() -> None:
    problems: list[str] = []
    for module in ALL.values():
        if not module.is_package:
            continue
        doc = ast.get_docstring(module.tree) or ""
        folder = module.path.parent
        names = {f"- `{path.stem}`:" for path in folder.glob("*.py") if path.stem != "__init__"}
        names |= {f"- `{path.parent.name}/`:" for path in folder.glob("*/__init__.py")}
        problems.extend(
            f"{module.where}: does not list {name}" for name in names if name not in doc
        )
    fail_with(problems, "add one line to the package's docstring")


def test_the_index_of_decisions_names_each_file_once_in_order() -> None:
    folder = ROOT / "docs" / "decisions"
    named = re.findall(r"^\| \[\d{4}\]\((\S+\.md)\) \|", (folder / "README.md").read_text(), re.M)
    assert named == sorted(path.name for path in folder.glob("[0-9]*.md"))


def test_documents_name_modules_that_exist() -> None:
    """A renamed module must not live on under its old name in a document."""
    trees = [ROOT / name for name in ("src", "tests", "benchmarks", "spark_jobs", "pyspark_topics")]
    paths = [path for tree in (*trees, ROOT / "examples") for path in tree.rglob("*.py")]
    # Documents shorten paths to their ends: `storage_types.py`, `commit/shard.py`.
    known = {
        "/".join(path.relative_to(ROOT).parts[start:])
        for path in paths
        for start in range(len(path.relative_to(ROOT).parts))
    }
    missing = [
        f"{page.relative_to(ROOT)}: {name}"
        for page in [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
        for name in re.findall(r"`([\w/]+\.py)`", page.read_text())
        if name not in known and not re.search("[A-Z]{2}", name)
    ]
    assert not missing, f"modules that do not exist: {missing}"
