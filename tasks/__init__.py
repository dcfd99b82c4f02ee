"""Thin Prefect tasks: each resolves a handle, calls one function of the library and returns a small record."""
