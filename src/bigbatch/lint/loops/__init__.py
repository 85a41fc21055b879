"""What is known of each training loop: what happens in it, and how often."""
