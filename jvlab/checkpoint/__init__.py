"""What a checkpoint's folder holds: config.json, safetensors headers, values. May import layout."""
