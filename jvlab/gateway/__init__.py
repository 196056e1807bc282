"""The gateway: state machines for liveness, leases and syncs, and the process that serves them.

Imports neither rollout nor worker.
"""
