"""Where processes run: SLURM's variables. Pure; nothing here starts anything."""
