"""Ranks on CPUs: what a collective costs, and one rank against two that share its cores."""
