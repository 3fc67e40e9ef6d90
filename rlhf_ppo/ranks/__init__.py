"""Which process this is, and what processes agree on: every room reads them, they read none."""
