"""The JAX side: the policy, losses, tasks and loops of training."""
