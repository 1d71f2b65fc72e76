"""Pages of records and topic states.

- `block_cache`: a cache of recently read segment blocks, bounded in bytes.
- `backward`: plans reads from the end: the last records, and pages in descending order.
- `exact_read`: finds and deletes exact seqs of a topic.
- `filtered`: finds the rows of a segment, or of a block in memory, that pass a filter.
- `object_cache`: a cache of the JSON objects of pages that are read again and again.
- `page`: plans one page of a topic: cursor, gaps, filters, budgets.
- `page_parts`: makes a page of blocks that were read together, and of JSON objects.
- `row_columns`: some records as parallel columns, for a claim.
- `segment_reader`: reads payloads of sealed records off the loop and caches their blocks.
- `topic_states`: builds a topic's state as clients see it (§1.2, §1.3).
"""
