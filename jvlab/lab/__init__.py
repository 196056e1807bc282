"""The objects a notebook uses: `Lab`, `Pool`, sessions, scaling, adapters, plots, magics.

May import sync and below.
"""
