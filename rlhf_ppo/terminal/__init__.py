"""What a run prints: a line for each log, a bar, a table at the end; and what of libraries is kept from printing."""
