"""Measurements, each a ratio against a peer or a floor in the same run: `jvlab bench`.

Programs over the public names.
"""
