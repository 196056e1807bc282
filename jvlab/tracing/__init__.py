"""How vLLM lays a model out: its own load_weights run on meta tensors, every copy written down.

May import checkpoint, rules and below.
"""
