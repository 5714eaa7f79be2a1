"""The check of annotations that tests/conftest.py puts on every function of ddtree."""

from beartype import BeartypeConf, beartype

# As PEP 484 and mypy have it: a whole number will do where a float is asked for.
check = beartype(conf=BeartypeConf(is_pep484_tower=True))
