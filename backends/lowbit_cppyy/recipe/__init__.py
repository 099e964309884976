"""Recipes: the choices by which one kernel differs from another."""
