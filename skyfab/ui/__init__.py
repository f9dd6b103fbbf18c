"""Events, and views of them."""
