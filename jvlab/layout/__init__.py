"""Where each element is stored in trainer and engine: regions, shards, the compiled plan, its proof and digests;
rules from leaves to tensors in rules/, what a checkpoint holds in checkpoint/.

Imports no other room; numpy only at import.
"""
