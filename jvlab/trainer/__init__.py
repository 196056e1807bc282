"""The JAX side: the policy, losses, tasks and loops of training. May import panels and below, but not planning."""
