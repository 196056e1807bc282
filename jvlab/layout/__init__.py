"""Where each element is stored in trainer and engine: regions, shards, the compiled plan, its proof and digests.

Imports no other room; numpy only at import.
"""
