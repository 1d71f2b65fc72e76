"""Where an archive may lie.

- `cloud`: a bucket of an object store, through obstore, which is an optional package.
- `opening`: opens the place that a URL names.
- `ranges`: opens a bucket, and reads ranges of its objects; Spark's executors load it.
- `retrying`: a place whose calls are tried again.
- `shared_folder`: a folder that several servers may write to, none over another's object.
"""
