"""Kernel-like functions on slot maps, each with its torch reference."""
