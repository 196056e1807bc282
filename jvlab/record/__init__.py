"""The record of a run: events appended to its folder, and staleness, throughput, timelines and tables from them.

May import samples and below.
"""
