"""Places of sealed segments: a data directory, or an archive in a folder or a bucket.

- `archive`: the newest base of an archive as a place; driver only.
- `files`: open files and objects, which executors read by ranges.
- `folder`: a data directory as a place.
- `opening`: distinguishes an archive from a data directory, and opens the place.
- `segment`: one listed segment, with the paths of its files.
"""
