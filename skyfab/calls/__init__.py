"""Functions and calls as the user writes them, and how they, the project's code and results are packed and unpacked."""
