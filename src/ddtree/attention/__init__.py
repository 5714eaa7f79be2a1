"""How tree rows see the context and their ancestors; one file per attention backend."""
