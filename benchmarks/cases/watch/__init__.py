"""Cases of watchers and streams."""
