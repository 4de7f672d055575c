"""Readers of what others recorded, and of what compilers left behind: cubins, SASS, build logs, traces, reports."""
