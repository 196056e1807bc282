"""The JAX side: policy, losses, tasks and loops here, what a checkpoint computes in decoder/, models without a
hub in models/.

May import views and below.
"""
