"""Job: an Iceberg table for each topic, kept up to date from sealed segments; needs no Spark.

- `__main__`: the command line.
- `catalogs`: the Iceberg catalog: SQLite in the output folder, or one from pyiceberg's
  configuration.
- `days`: makes days of a table equal to the store: removes deleted rows, fills typed payloads.
- `payloads`: types of payloads: the notation of `--schema`, and the allowed changes of a column.
- `sealed`: the sealed records of a topic from a position on.
- `tables`: a topic's table: its owner, its types, its position, appends that move the position.
"""
