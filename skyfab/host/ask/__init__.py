"""The questions that a host answers: one module for each, with a function of the same name."""
