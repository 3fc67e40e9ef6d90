"""From prompts to responses: sampling, truncation at the stop token, and the one response mask."""
