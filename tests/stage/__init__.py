"""What the behaviour tests stand on: spots that both sides see, programs run as a user would, marks of what is left."""
