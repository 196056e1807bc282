"""What a notebook holds: `Lab`, `Pool`, sessions, scaling, adapters, plots, magics. May import cluster and below."""
