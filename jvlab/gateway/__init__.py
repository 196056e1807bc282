"""Who is alive, who holds the lab, what happens next: state machines, and the process that serves them.

Imports neither rollout nor worker.
"""
