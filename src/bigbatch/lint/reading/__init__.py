"""What a script does, in order: a walk over its tree that follows names, conditions and the file's own functions."""
