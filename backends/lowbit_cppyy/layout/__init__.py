"""Layouts: how a prepared matrix and its activations lie in memory."""
