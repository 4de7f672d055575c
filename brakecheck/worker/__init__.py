"""Runs inside the stack under test: standard library and torch only, Python 3.9 on; shipped to it by path."""
