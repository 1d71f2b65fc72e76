"""The benchmarks, one file a group: each maps a `Bench` to figures; `registry` names them."""
