"""The vLLM side: engine process, worker extension, rollout batches."""
