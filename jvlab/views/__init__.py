"""What a person sees: reprs, progress, plots."""
