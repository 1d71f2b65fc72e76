"""Parts that all jobs share: arguments, outputs, pictures, messages about missing packages.

- `installing`: messages that say which packages to install.
- `job`: the arguments and the common code of every job.
- `outputs`: folders that jobs write to, with their marker.
- `pictures`: pictures of results, by matplotlib.
- `pipeline_config`: the configuration of a pipeline.
"""
