"""Work behind the requests: sealing, checkpoints, recovery, large appends.

- `append_decoder`: the helper process that checks and decodes large appends.
- `capture`: encodes one topic as a snapshot part, and restores it.
- `checkpointer`: checkpoints: captures topics in slices, publishes, trims the journal.
- `epochs`: keeps the epochs of dropped names in the snapshot.
- `kept_parts`: the encoded parts that a checkpoint takes over from the one before it.
- `large_appends`: decodes large appends one at a time in the helper process.
- `mender`: mends damaged segments from undamaged copies, without a restart.
- `packing`: packs segments: one that is due, and the next one while the first is written.
- `recovery`: the boot sequence: restore, replay, check the files, make durable.
- `scrub`: reads every sealed record periodically, to find damage.
- `seal_plan`: plans which runs to seal, move to the cold folder or drop.
- `sealer`: background jobs on sealed data: expire, seal, flip, relocate, drop.
"""
