"""The clock, metrics, logging and other services of the process.

- `backup_metrics`: the rows of the metrics of backups, of the archive and of the scrub.
- `busy_polling`: the loop polls for the next request of a lone client.
- `clock`: the clock: wall time, monotonic time, random ids.
- `garbage_collector`: schedules Python's garbage collector so that no loop turn is long.
- `helper_process`: the life of a helper process: start, requests, time limit, end.
- `logging`: the log: text or JSON lines on standard error, written by its own thread.
- `metric_rows`: the types of the table of metrics.
- `metric_table`: every metric, once: name, kind, help and getter.
- `metrics`: counters and histograms, and the snapshot a scrape reads.
- `open_files`: how the process divides the files that it may have open. Pure.
- `prometheus`: renders metrics as Prometheus text (format 0.0.4) or JSON values.
- `thread_offload`: runs the engine's blocking calls on a thread pool.
"""
