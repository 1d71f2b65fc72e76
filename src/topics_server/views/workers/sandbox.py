"""Confines the SQL of view definitions and queries.

The database calls the authorizer with every action of a statement before it runs. An action, a
function or a table that is not on a list is refused. Limits on lengths, memory and time apply to
allowed statements. There is one connection for each view file and purpose; its *mode* says whose
statement is being compiled. Runs in helper processes only: called by `view_file` and
`query_worker`.
"""

from __future__ import annotations

import enum
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from topics_server.runtime.clock import monotonic_ms, random_hex
from topics_server.values.limits import MIB, VIEW_SQL_BYTES_MAX

# Names of the server's own table in a view file; a definition cannot create or read them.
OWN_PREFIX: Final = "_topics"

_VALUE_BYTES_MAX: Final = 64 * MIB
# Operations of the database's virtual machine between two checks of the time.
_STEPS: Final = 20_000
_LIMITS: Final = {
    sqlite3.SQLITE_LIMIT_LENGTH: _VALUE_BYTES_MAX,
    sqlite3.SQLITE_LIMIT_SQL_LENGTH: VIEW_SQL_BYTES_MAX + 1024,
    sqlite3.SQLITE_LIMIT_COLUMN: 200,
    sqlite3.SQLITE_LIMIT_EXPR_DEPTH: 200,
    sqlite3.SQLITE_LIMIT_COMPOUND_SELECT: 50,
    sqlite3.SQLITE_LIMIT_ATTACHED: 0,
    sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH: 100,
    sqlite3.SQLITE_LIMIT_VARIABLE_NUMBER: 250,
    sqlite3.SQLITE_LIMIT_TRIGGER_DEPTH: 1,
    sqlite3.SQLITE_LIMIT_WORKER_THREADS: 0,
}

_SCHEMA_TABLES: Final = frozenset({"sqlite_master", "sqlite_schema"})
_TABLE_FUNCTIONS: Final = frozenset({"json_each", "json_tree"})

_PURE_FUNCTIONS: Final = frozenset(
    """
    abs char coalesce concat concat_ws format glob hex ifnull iif instr length like likelihood
    likely lower ltrim max min nullif octet_length printf quote replace round rtrim sign substr
    substring trim typeof unhex unicode unlikely upper zeroblob
    avg count group_concat string_agg sum total
    row_number rank dense_rank percent_rank cume_dist ntile lag lead first_value last_value
    nth_value
    acos acosh asin asinh atan atan2 atanh ceil ceiling cos cosh degrees exp floor ln log log10
    log2 mod pi pow power radians sin sinh sqrt tan tanh trunc
    json json_array json_array_length json_extract json_insert json_object json_patch json_pretty
    json_quote json_remove json_replace json_set json_type json_valid json_error_position
    json_group_array json_group_object json_each json_tree -> ->>
    """.split()
)
# In a view, these functions take the time only from their arguments; see `add_dates`.
_DATE_FUNCTIONS: Final = frozenset("date time datetime julianday unixepoch strftime".split())
_QUERY_FUNCTIONS: Final = (
    _PURE_FUNCTIONS
    | _DATE_FUNCTIONS
    | frozenset("random randomblob current_date current_time current_timestamp timediff".split())
)
_APPLY_FUNCTIONS: Final = _PURE_FUNCTIONS | _DATE_FUNCTIONS

_READS: Final = frozenset(
    {
        sqlite3.SQLITE_SELECT,
        sqlite3.SQLITE_READ,
        sqlite3.SQLITE_FUNCTION,
        sqlite3.SQLITE_RECURSIVE,
    }
)
_WRITES: Final = frozenset({sqlite3.SQLITE_INSERT, sqlite3.SQLITE_UPDATE, sqlite3.SQLITE_DELETE})
_MAKES: Final = frozenset(
    {
        sqlite3.SQLITE_CREATE_TABLE,
        sqlite3.SQLITE_CREATE_INDEX,
        sqlite3.SQLITE_CREATE_VIEW,
        sqlite3.SQLITE_REINDEX,
    }
)
_ACTIONS: Final = {
    getattr(sqlite3, name): name.removeprefix("SQLITE_").replace("_", " ")
    for name in (
        "SQLITE_ALTER_TABLE SQLITE_ANALYZE SQLITE_ATTACH SQLITE_CREATE_INDEX SQLITE_CREATE_TABLE "
        "SQLITE_CREATE_TEMP_INDEX SQLITE_CREATE_TEMP_TABLE SQLITE_CREATE_TEMP_TRIGGER "
        "SQLITE_CREATE_TEMP_VIEW SQLITE_CREATE_TRIGGER SQLITE_CREATE_VIEW SQLITE_CREATE_VTABLE "
        "SQLITE_DELETE SQLITE_DETACH SQLITE_DROP_INDEX SQLITE_DROP_TABLE SQLITE_DROP_TEMP_INDEX "
        "SQLITE_DROP_TEMP_TABLE SQLITE_DROP_TEMP_TRIGGER SQLITE_DROP_TEMP_VIEW "
        "SQLITE_DROP_TRIGGER SQLITE_DROP_VIEW SQLITE_DROP_VTABLE SQLITE_INSERT SQLITE_PRAGMA "
        "SQLITE_READ SQLITE_REINDEX SQLITE_SAVEPOINT SQLITE_TRANSACTION SQLITE_UPDATE"
    ).split()
}


class Mode(enum.Enum):
    """The author of the statement that the connection compiles."""

    OWN = "own"
    SCHEMA = "schema"
    APPLY = "apply"
    QUERY = "query"


class Sandbox:
    """A confined connection. `refusal`: why the authorizer refused the last statement."""

    def __init__(self, connection: sqlite3.Connection, *, heap_bytes: int) -> None:
        self.connection = connection
        self.refusal: str | None = None
        self._mode = Mode.OWN
        self._deadline = 0.0
        self._secret = random_hex(16)
        for limit, bound in _LIMITS.items():
            connection.setlimit(limit, bound)
        for pragma in (
            "trusted_schema = OFF",
            "temp_store = MEMORY",
            "cell_size_check = ON",
            "cache_size = -4096",
            f"soft_heap_limit = {heap_bytes // 2}",
            f"hard_heap_limit = {heap_bytes}",
        ):
            connection.execute(f"PRAGMA {pragma}")
        modules = connection.execute("SELECT name FROM pragma_module_list").fetchall()
        self._modules = frozenset(str(name).lower() for (name,) in modules) - _TABLE_FUNCTIONS
        self._tables: frozenset[str] = frozenset()
        # The declaration of these functions reads a schema table: run it now, while nothing is
        # refused.
        connection.execute("SELECT 1 FROM json_each('[]'), json_tree('[]')").fetchall()
        connection.set_authorizer(self._authorize)
        connection.set_progress_handler(self._is_late, _STEPS)

    def learn_tables(self) -> None:
        """Note the tables of the definition: statements may name these and no others."""
        rows = self.own("SELECT name FROM sqlite_schema WHERE type IN ('table', 'view')")
        names = (str(name).lower() for (name,) in rows)
        self._tables = frozenset(name for name in names if not _is_reserved(name))

    def own(self, sql: str, parameters: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
        """Run a statement of the server, unconfined; returns its rows."""
        assert self._mode is Mode.OWN
        # The connection caches compiled statements by their text. The secret makes our texts differ
        # from every user's text, so that no user's statement is found compiled without the
        # authorizer.
        return self.connection.execute(f"/* {self._secret} */ {sql}", parameters).fetchall()

    @contextmanager
    def mode(self, mode: Mode, seconds: float) -> Iterator[sqlite3.Connection]:
        """The connection for a user's statements, which are stopped after so many seconds."""
        assert self._mode is Mode.OWN
        self._mode = mode
        self.refusal = None
        self._deadline = monotonic_ms() + seconds * 1000
        try:
            yield self.connection
        finally:
            self._mode = Mode.OWN
            self._deadline = 0.0

    @property
    def is_late(self) -> bool:
        """Whether the time of the statements is over."""
        return bool(self._is_late())

    def _is_late(self) -> int:
        return int(self._deadline > 0 and monotonic_ms() > self._deadline)

    def _authorize(
        self, action: int, first: str | None, second: str | None, base: str | None, _by: str | None
    ) -> int:
        if self._mode is Mode.OWN:
            return sqlite3.SQLITE_OK
        refusal = self._refusal(action, first or "", second or "", base)
        if refusal is None:
            return sqlite3.SQLITE_OK
        if self.refusal is None:
            self.refusal = refusal
        return sqlite3.SQLITE_DENY

    def _refusal(self, action: int, first: str, second: str, base: str | None) -> str | None:
        """Why an action is refused; None if it is allowed."""
        mode = self._mode
        if action == sqlite3.SQLITE_FUNCTION:
            name = second.lower()
            functions = _QUERY_FUNCTIONS if mode is Mode.QUERY else _APPLY_FUNCTIONS
            if name in functions:
                return None
            if name in _QUERY_FUNCTIONS:
                return f"the function {name}() is not deterministic: a view must not call it"
            return f"the function {name}() is not available"
        if action in (sqlite3.SQLITE_SELECT, sqlite3.SQLITE_RECURSIVE):
            return None
        name = first.lower()
        if base not in (None, "main"):
            return f"the database {base} is not available"
        if action == sqlite3.SQLITE_READ:
            return self._refused_read(name, second)
        if action in _WRITES and mode in (Mode.APPLY, Mode.SCHEMA):
            if name in self._tables or (mode is Mode.SCHEMA and self._may_make(name)):
                return None
            if mode is Mode.SCHEMA and name in _SCHEMA_TABLES:
                return None  # how a table is created
            return f"the table {first} is not of this view"
        if action in _MAKES and mode is Mode.SCHEMA:
            # The second name is the table of the index.
            if all(self._may_make(given) for given in (name, second.lower()) if given):
                return None
            # The database names the index that a table implies.
            if action == sqlite3.SQLITE_CREATE_INDEX and name.startswith("sqlite_autoindex"):
                return None
            return f"the name {first} is reserved"
        words = _ACTIONS.get(action, "this")
        where = {
            Mode.SCHEMA: "schema may create tables, indexes and views",
            Mode.APPLY: "apply may insert, update, delete and select",
            Mode.QUERY: "a query may only select",
        }
        return f"{words} is not allowed: {where.get(mode, '')}"

    def _refused_read(self, name: str, column: str) -> str | None:
        if name in self._tables or name in _TABLE_FUNCTIONS:
            return None
        if self._mode is Mode.SCHEMA and (name in _SCHEMA_TABLES or self._may_make(name)):
            return None
        # A reference without a column may be to a name from WITH, which is no table of the
        # database.
        if not column and self._may_make(name):
            return None
        return f"the table {name} is not of this view"

    def _may_make(self, name: str) -> bool:
        return not _is_reserved(name) and name not in self._modules


def _is_reserved(name: str) -> bool:
    return name.startswith(("sqlite_", "pragma_", OWN_PREFIX))


# -- dates that depend on their arguments only ------------------------------------------------


def add_dates(sandbox: Sandbox) -> None:
    """Replace the date functions by ones that never read the current time.

    `datetime('now')`, `datetime()` and the modifiers of the local time zone are refused: so a view
    has the same rows each time it is built.
    """
    scratch = sqlite3.connect(":memory:")
    for name in _DATE_FUNCTIONS:
        function = _date_function(sandbox, scratch, name)
        sandbox.connection.create_function(name, -1, function, deterministic=True)


_IMPURE: Final = frozenset({"now", "localtime", "utc"})


def _date_function(sandbox: Sandbox, scratch: sqlite3.Connection, name: str) -> Callable[..., Any]:
    least = 2 if name == "strftime" else 1

    def call(*arguments: Any) -> Any:
        words = {_word_of(argument) for argument in arguments}
        if len(arguments) < least or words & _IMPURE:
            sandbox.refusal = f"{name}() of the present time or zone is not deterministic"
            raise ValueError(sandbox.refusal)
        marks = ",".join("?" * len(arguments))
        return scratch.execute(f"SELECT {name}({marks})", arguments).fetchone()[0]

    return call


def _word_of(argument: Any) -> str:
    if isinstance(argument, bytes):
        argument = argument.decode("utf-8", "replace")
    return argument.strip().lower() if isinstance(argument, str) else ""
