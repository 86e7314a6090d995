"""UCX through ucxx."""
