"""What tests of several folders stand on."""
