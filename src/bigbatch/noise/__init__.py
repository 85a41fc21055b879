"""Which batch size is worth having, from how much the gradients of micro-batches differ."""
