"""The places for an archive.

- `cloud`: a bucket of an object store, through obstore, which is an optional package.
- `opening`: opens the place of a URL.
- `ranges`: opens a bucket, and reads ranges of its objects; Spark's executors load it.
- `retrying`: wraps a place and repeats failed calls.
- `shared_folder`: a folder to which several servers may write, without replacing any object.
"""
