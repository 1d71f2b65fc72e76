"""The OpenAPI document of all routes.

- `append_operation`: the append of records, with its producer headers.
- `backup_operations`: the operations of backups, and their schemas.
- `condition_schemas`: conditions of writes: the member `if`, and the header `If-Match`.
- `consumer_operations`: the operations of consumers, and their schemas.
- `document`: builds the OpenAPI 3.1 document.
- `examples`: the example requests and answers of the OpenAPI document.
- `find_operations`: the operations of plain reads, and their schemas.
- `live_operations`: the operations of live streams, and the schema of their tickets.
- `operations`: builds one operation of the OpenAPI document.
- `router_schemas`: JSON schemas of routers for the OpenAPI document.
- `schemas`: JSON schemas of requests and responses for the OpenAPI document.
- `stream_operations`: the Durable Streams operations of the OpenAPI document.
- `view_operations`: the operations of materialized views, and their schemas.
"""
