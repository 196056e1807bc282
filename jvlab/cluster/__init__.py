"""Where processes run: Ray, SLURM. May import sync and below."""
