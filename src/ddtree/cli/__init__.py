"""The command line, a file per command; `app` puts them together."""
