"""Contents of a checkpoint folder: config.json, safetensors headers, values. Imports layout only."""
