"""This engine on CPUs against other engines, each installed into an environment of its own."""
