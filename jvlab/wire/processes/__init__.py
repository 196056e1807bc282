"""Starts, watches and ends a rollout process on one host, and reads its log. May import wire and below."""
