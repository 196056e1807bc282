"""The vLLM side: the process of one engine, which generates, scores and receives weights.

Imports worker and below, never gateway.
"""
