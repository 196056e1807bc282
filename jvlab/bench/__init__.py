"""`jvlab bench`: measurements, each a ratio against a peer or a floor in the same run.

Programs that use the public API.
"""
