"""How vLLM lays out a model: its own load_weights runs on meta tensors, and every copy is recorded.

May import wire, layout and below.
"""
