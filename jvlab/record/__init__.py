"""What happened? Events appended to a run folder, and staleness, throughput, timelines and tables derived from them.

May import samples and below.
"""
