"""What runs inside vLLM's workers and engine core: takes weights in, verifies, commits.

May import tracing, transport and below.
"""
