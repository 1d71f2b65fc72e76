"""Verbs on records.

- `append`: `topics append`: appends one record.
- `append_lines`: `topics append TOPIC -`: appends every line of standard input as it arrives.
- `conditions`: the options of a conditional append, and the condition that they make.
- `consumer`: `topics consumer`: put, ls, get, commit and rm of consumers.
- `cutting`: cuts a line of a file into a record without changing value bytes.
- `delete`: `topics delete`: deletes records by tag, tag prefix or position (§5).
- `lines`: reads lines of a plain or gzip file in bounded memory.
- `load`: `topics load`: appends every line of a file once, in order.
- `loading`: the work of `topics load`: compares topic and file, sends the rest.
- `producers`: one append with producer headers, retried until its result is known.
- `pub`: `topics pub`: publishes standard input over a WebSocket (§7).
- `read`: `topics read`: prints records from a position, and follows.
- `resume`: decides how many lines of a file a topic already holds.
"""
