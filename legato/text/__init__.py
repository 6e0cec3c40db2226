"""Text stages: each has push() and flush(), holds back only what may still change, and never trusts a chunk boundary."""
