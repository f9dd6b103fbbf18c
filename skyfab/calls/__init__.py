"""What the user says, and how it travels."""
