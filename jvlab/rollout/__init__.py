"""The vLLM side: the process of one engine, which generates, scores and takes weights.

Imports worker and below, never gateway.
"""
