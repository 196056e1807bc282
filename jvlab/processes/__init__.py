"""How a rollout process is started, watched, read and ended on one host. May import wire and below."""
