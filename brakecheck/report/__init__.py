"""A Comparison for people: terminal, HTML, Markdown, JUnit. Takes nothing but the comparison."""

from .write import write

__all__ = ["write"]
