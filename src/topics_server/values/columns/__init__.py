"""Work on whole columns of records at once, by numpy and `struct`. Leaves, without state.

- `cutting`: many pieces of a buffer, and numbers as decimal text.
- `json_rows`: the rows of a block as JSON.
"""
