"""Prefect flows: the runs that a user deploys, starts and watches."""
