"""Terminal output of a run, and escaping of untrusted text."""
