"""The helper processes of views, and the files of a view on the disk.

- `apply_worker`: the process that applies records to the files of all views.
- `query_worker`: a process that answers queries of views.
- `records`: the records of a batch as columns.
- `sandbox`: confines the SQL of definitions and queries.
- `view_file`: one file of one view: its tables and its position.
- `view_folder`: the server's access to the folder of a view.
"""
