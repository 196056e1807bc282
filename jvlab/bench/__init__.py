"""Measurements, each a ratio against a peer or a floor in the same run. Run them with `jvlab bench`."""
