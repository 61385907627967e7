"""Workers as the scheduler drives them."""
