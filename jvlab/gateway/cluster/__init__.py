"""Where processes run: Ray, SLURM. May import what the gateway may."""
