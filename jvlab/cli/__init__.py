"""The `jvlab` command; uses the public API."""
