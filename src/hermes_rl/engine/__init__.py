"""The local engine: a server that speaks the Tinker protocol on one's own hardware.

One base model, any number of LoRA adapters on it, sampling, losses, Adam and checkpoints. Nothing heavy is
imported here: :mod:`hermes_rl.engine.registry` starts and finds engines without torch;
:mod:`hermes_rl.engine.process` is the server's own process.
"""
