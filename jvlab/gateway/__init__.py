"""Who is alive, who may write, who gets work: state machines without I/O, and the process that serves them.

May import engine and below; where processes run (Ray, SLURM) is in cluster/.
"""
