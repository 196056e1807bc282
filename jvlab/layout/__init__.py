"""Where each element is stored in trainer and engine: regions, shards, the compiled plan, its proof and digests;
what a checkpoint holds; rules from leaves to tensors in rules/.

Imports no other room; numpy only at import.
"""
