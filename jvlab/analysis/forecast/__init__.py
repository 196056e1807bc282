"""A model of the GRPO loop, fitted to records of real runs, that predicts runs with other settings.

May import lab and below.
"""
