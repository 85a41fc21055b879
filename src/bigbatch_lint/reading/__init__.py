"""Files as syntax trees, and what their names say."""
