"""Finding environments, reading their configuration fields, and driving one of them.

An environment is an Atropos ``BaseEnv`` subclass, unmodified. Discovery reads syntax trees only; reading
fields imports the environment in a child process; driving it happens in a process of its own.
"""
