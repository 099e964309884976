"""The suite: cases, inputs, comparisons, and the tests of the clauses."""
