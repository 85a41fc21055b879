"""From files to findings, and findings as text."""
