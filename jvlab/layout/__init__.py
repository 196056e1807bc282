"""Where every number lives on both sides: regions, shards, the compiled plan, its proof and digests.

Imports no other room; numpy only at import.
"""
