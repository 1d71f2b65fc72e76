"""One topic's Iceberg table: its owner, its types, its position, appends that move the position.

The position is in the summary of the snapshot that adds the rows, so one commit of Iceberg changes
both or neither. A commit names the snapshot that it follows, so it fails if another writer was
faster. The job does not repeat it after the other's commit, which may have added the same rows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final

import xxhash

from spark_jobs.to_iceberg.catalogs import LakeRefused
from spark_jobs.to_iceberg.sealed import PAYLOAD, LakePosition

VERSION: Final = "1"
# Properties of a table.
OWN_VERSION: Final = "topics.version"
OWN_TOPIC: Final = "topics.topic"
OWN_STORE: Final = "topics.store-id"
# Properties of a snapshot.
EPOCH: Final = "topics.epoch"
NEXT_SEQ: Final = "topics.next-seq"
_RETRIES: Final = "commit.retry.num-retries"
_PORTABLE: Final = re.compile(r"[^A-Za-z0-9_]")


class LakeRaced(LakeRefused):
    """Another writer changed the table during the run."""


def names_for(topic: str) -> tuple[str, str]:
    """The table's name, and its second name if another topic's table has the first.

    The names have only letters, digits and `_`, which every engine can read.
    """
    plain = _PORTABLE.sub("_", topic)
    return plain, f"{plain}_{xxhash.xxh3_64_hexdigest(topic.encode())[:8]}"


def arrow_schema() -> Any:
    """The columns of the Spark source; columns that every record has are required."""
    import pyarrow as pa

    from spark_jobs.reader.columns import schema_of
    from spark_jobs.reader.query import Query

    optional = {"node", "tag", "meta"}
    columns = schema_of(Query().columns)
    return pa.schema([column.with_nullable(column.name in optional) for column in columns])


class TopicTable:
    """The table of a topic in a catalog, created if it does not exist.

    `store`: the id of the store that is read; None: unknown. Raises `LakeRefused` for a table of
    another store, or one that this job did not create.
    """

    def __init__(self, catalog: Any, namespace: str, topic: str, store: str | None) -> None:
        self._catalog: Final = catalog
        self._topic: Final = topic
        self._store: Final = store
        self.identifier: Final = self._find(namespace)
        self._load()

    def _find(self, namespace: str) -> tuple[str, ...]:
        """The identifier of the topic's table."""
        from pyiceberg.exceptions import NoSuchTableError, TableAlreadyExistsError

        space = tuple(namespace.split("."))
        for name in names_for(self._topic):
            identifier = (*space, name)
            try:
                known = self._catalog.load_table(identifier)
            except NoSuchTableError:
                try:
                    known = self._make(identifier)
                except TableAlreadyExistsError:
                    known = self._catalog.load_table(identifier)
            self._check(known, identifier)
            if known.properties[OWN_TOPIC] == self._topic:
                return identifier
        raise LakeRefused(f"{'.'.join(identifier)}: is the table of another topic")

    def _make(self, identifier: tuple[str, ...]) -> Any:
        from pyiceberg.partitioning import PartitionField, PartitionSpec
        from pyiceberg.schema import Schema
        from pyiceberg.transforms import DayTransform
        from pyiceberg.types import LongType, NestedField, StringType, TimestamptzType

        kinds = {"string": StringType, "int64": LongType}
        columns = [
            NestedField(
                number,
                column.name,
                kinds.get(str(column.type), TimestamptzType)(),
                required=not column.nullable,
            )
            for number, column in enumerate(arrow_schema(), 1)
        ]
        (ts,) = [column.field_id for column in columns if column.name == "ts"]
        properties = {
            OWN_VERSION: VERSION,
            OWN_TOPIC: self._topic,
            "write.parquet.compression-codec": "zstd",
        }
        if self._store is not None:
            properties[OWN_STORE] = self._store
        return self._catalog.create_table(
            identifier,
            schema=Schema(*columns),
            partition_spec=PartitionSpec(PartitionField(ts, 1000, DayTransform(), "day")),
            properties=properties,
        )

    def _check(self, table: Any, identifier: tuple[str, ...]) -> None:
        """Refuse a table that this job did not make for this store."""
        name, own = ".".join(identifier), table.properties
        if OWN_TOPIC not in own:
            raise LakeRefused(
                f"{name}: was not made by this job (it has no property {OWN_TOPIC}); "
                "name another --namespace"
            )
        if own.get(OWN_VERSION) != VERSION:
            raise LakeRefused(f"{name}: is of version {own.get(OWN_VERSION)}, not {VERSION}")
        store = own.get(OWN_STORE)
        if store != self._store and None not in (store, self._store):
            raise LakeRefused(
                f"{name}: is of store {store}, and store {self._store} is read; "
                "name another --namespace"
            )

    def _load(self) -> None:
        self._table = self._catalog.load_table(self.identifier)
        self._check(self._table, self.identifier)
        # By default pyiceberg repeats a commit that lost a race, after the winner's snapshot. The
        # setting changes only this loaded copy of the table, not other writers.
        self._table.metadata.properties[_RETRIES] = "0"

    @property
    def table(self) -> Any:
        """The table after the last commit of this run."""
        return self._table

    # -- types -----------------------------------------------------------------------------------

    def struct(self) -> Any:
        """The Arrow struct of the typed payloads, with the fields that a schema can express, or
        None.
        """
        from spark_jobs.to_iceberg.payloads import struct_of

        return struct_of(self._table.schema(), PAYLOAD)

    def widen(self, struct: Any) -> None:
        """Add a column of typed payloads to the table, or add and widen fields in it.

        This makes a separate commit without a snapshot, which does not move the position. Raises
        `LakeRefused` for a field that cannot have its type.
        """
        from pyiceberg.exceptions import CommitFailedException

        from spark_jobs.to_iceberg.payloads import check_evolution, column_of

        asked = column_of(PAYLOAD, struct)
        check_evolution(self._table.schema(), asked, ".".join(self.identifier))
        try:
            with self._table.update_schema() as change:
                change.union_by_name(asked)
        except CommitFailedException as error:
            raise self._raced(str(error)) from None
        self._load()

    # -- positions -------------------------------------------------------------------------------

    def position(self) -> LakePosition:
        """The table's position, from the newest snapshot that has one, or else from the newest
        row.
        """
        metadata = self._table.metadata
        snapshot = self._table.current_snapshot()
        if snapshot is None:
            return LakePosition(0, 1)
        while snapshot is not None:
            summary = snapshot.summary
            said = {} if summary is None else summary.additional_properties
            if EPOCH in said and NEXT_SEQ in said:
                return LakePosition(int(said[EPOCH]), int(said[NEXT_SEQ]))
            # a compaction, or another change by another engine
            parent = snapshot.parent_snapshot_id
            snapshot = None if parent is None else metadata.snapshot_by_id(parent)
        return self._newest_row()

    def _newest_row(self) -> LakePosition:
        """The position behind the newest row, for a table whose snapshots with a position have
        expired.
        """
        newest = LakePosition(0, 1)
        for batch in self._table.scan(selected_fields=("epoch", "seq")).to_arrow_batch_reader():
            for epoch, seq in zip(
                batch["epoch"].to_pylist(), batch["seq"].to_pylist(), strict=True
            ):
                newest = max(newest, LakePosition(epoch, seq + 1))
        return newest

    # -- commits ---------------------------------------------------------------------------------

    def append(self, rows: Any, after: LakePosition, position: LakePosition) -> None:
        """Add the rows that follow `after` and move the position, in one commit.

        Raises `LakeRaced` if the table has another position.
        """
        if self.position() != after:
            raise self._raced("its position moved")
        self._commit(None, [rows], position)

    def replace(self, where: Any, parts: Iterable[Any]) -> None:
        """Replace the rows that an expression selects, in one commit."""
        self._commit(where, parts, self.position())

    def _commit(self, where: Any, parts: Iterable[Any], position: LakePosition) -> None:
        from pyiceberg.exceptions import CommitFailedException, ValidationException

        said = {EPOCH: str(position.epoch), NEXT_SEQ: str(position.next_seq)}
        try:
            with self._table.transaction() as change:
                if where is not None:
                    change.delete(where, snapshot_properties=said)
                for rows in parts:
                    change.append(self._stored(rows), snapshot_properties=said)
        except (CommitFailedException, ValidationException) as error:
            raise self._raced(str(error)) from None
        self._load()

    def _stored(self, rows: Any) -> Any:
        """Rows with the types of the table; missing fields are null."""
        if PAYLOAD not in rows.column_names:
            return rows.cast(arrow_schema())
        from spark_jobs.to_iceberg.payloads import as_struct

        struct = self.struct()
        if struct is None:
            raise self._raced(f"its column {PAYLOAD} went")
        payloads = as_struct(rows[PAYLOAD].combine_chunks(), struct)
        return rows.drop_columns([PAYLOAD]).cast(arrow_schema()).append_column(PAYLOAD, payloads)

    def _raced(self, how: str) -> LakeRaced:
        return LakeRaced(
            f"{'.'.join(self.identifier)}: another writer changed it meanwhile ({how}); nothing of "
            "this commit is in it, the next run goes on"
        )
