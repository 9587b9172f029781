"""Aggregators: how captured queries become one score a position. One file each."""
