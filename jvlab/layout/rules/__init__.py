"""Maps leaves to checkpoint tensors, axes included: the rule language, built-in rule sets, inference.

Imports layout only.
"""
