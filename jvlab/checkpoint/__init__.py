"""Contents of a checkpoint folder: config.json, safetensors headers, values. May import layout."""
