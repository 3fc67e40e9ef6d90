"""Signals, random numbers, and the collective operations of several processes."""
