"""Parts that all jobs share: arguments, outputs, pictures, what to install.

- `installing`: what to install when something is missing.
- `job`: the arguments and the frame of every job.
- `outputs`: folders that jobs write to, with their marker.
- `pictures`: pictures of results, by matplotlib.
- `pipeline_config`: the configuration of a pipeline.
"""
