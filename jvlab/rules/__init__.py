"""Which leaf is which checkpoint tensor, and how its axes lie there: the rule language, built-in sets, inference.

May import layout and checkpoint.
"""
