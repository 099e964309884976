"""Mixture of experts: routing, and experts that are loaded when they are needed."""
