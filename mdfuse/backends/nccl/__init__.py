"""NCCL by its own functions: the fast lane."""
