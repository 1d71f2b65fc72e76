"""Views: records a second, read-your-writes, appends beside views; and the same work by hand."""
