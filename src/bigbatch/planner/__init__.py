"""What a batch needs before it is trained, also of a device that is not here."""
