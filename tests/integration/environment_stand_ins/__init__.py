"""What stands in for the trainer's side in tests of the environment runner: real servers on real sockets."""
