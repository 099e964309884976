"""Code generation: from a recipe to a program, and from a program to C++ for one instruction set."""
