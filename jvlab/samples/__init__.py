"""What a rollout returns: `RolloutBatch`, `Sample`, `Scores`, and files of them. Imports root modules only."""
