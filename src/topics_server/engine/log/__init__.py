"""The records of one topic in memory.

- `block_slices`: parts of a block as blocks of their own.
- `log`: the records of one topic: runs in seq order, head, floor, holes.
- `losses`: the losses of a log: holes, and the reasons below the floor.
- `mended`: takes the rows of a mended segment back into its log.
- `runs`: runs: unbroken ranges of records, sealed or not, with their dead slots.
- `seq_rows`: finds the rows that seq runs cover, and the rows that a walk passes.
- `tags`: the tag index of one unsealed block.
"""
