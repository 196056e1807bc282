"""What a run leaves behind: batches of samples, events appended to its folder, and staleness, throughput,
timelines and tables from them.

May import layout.
"""
