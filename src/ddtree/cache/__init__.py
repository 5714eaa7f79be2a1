"""Keys and values of everything committed: append, keep, crop. Library quirks: `hf` alone."""
