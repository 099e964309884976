"""lowbit on a machine with an NVIDIA GPU: `run.sh` begins here, `measure` runs the parts, each a module of its own."""
