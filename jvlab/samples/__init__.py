"""What a rollout returns: `RolloutBatch`, `Sample`, `Scores`, and files of them. May import the shared words only."""
