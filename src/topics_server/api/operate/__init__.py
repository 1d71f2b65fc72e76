"""Routes for operators: probes, metrics, admin, front page, console, reference.

- `admin`: the route `POST /v0/admin/seal`.
- `backup`: the routes `POST` and `GET /v0/admin/backup`.
- `console`: the console at `/console` and its files.
- `front_page`: the page at `/`, for a browser and for curl.
- `metrics_snapshot`: gathers the metrics snapshot of a scrape.
- `probes`: health, readiness and metrics routes (§8).
- `reference`: the API reference page at `/v0/docs` and its files.
- `version`: the installed version, for probes, metrics and pages.
"""
