"""Text stages: push() and flush(); each holds back only what may still change, and never trusts a chunk boundary."""
