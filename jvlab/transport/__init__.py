"""How the bytes of a plan move: one small interface, and the ways that implement it."""
