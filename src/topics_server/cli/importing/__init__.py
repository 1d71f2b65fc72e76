"""The verb `topics import`: imports records of files and other servers, each once and with its
time.

- `appending`: appends a source's batches once; its producer's epoch is the position.
- `export_folder`: the files of a folder that `topics export` wrote.
- `files`: a source that reads lines of files, and the check that they are the same files.
- `import_verb`: `topics import`: the options and the output.
- `other_server`: a source that reads a topic of another server by diff.
- `stamping`: turns a line or a record into an append with `meta.$imported`.
"""
