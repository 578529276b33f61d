"""Moves bytes into slots."""
