"""How long a backend may take where the user does not say: seconds for one call, and for loading it."""

DEADLINE = 30.0
LOADING_DEADLINE = 120.0
