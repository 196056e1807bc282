"""The `jvlab` command. Programs over the public names."""
